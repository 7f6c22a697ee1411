// Ends the test program if a test hangs, and prints the stacks of all threads (addr2line converts them to source
// lines).
#pragma once

#include <dirent.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace sparkhvd::test {

class Watchdog {
 public:
  /// Much longer than the longest test takes, even under a sanitizer and on shared CPUs.
  static constexpr unsigned kLimitS = 240;

  Watchdog() {
    void* frames[1];
    ::backtrace(frames, 1);  // loads its library now, because a signal handler must not load it
    ::signal(SIGUSR2, [](int) {
      void* stack[64];
      ::backtrace_symbols_fd(stack, ::backtrace(stack, 64), STDERR_FILENO);
    });
    ::signal(SIGALRM, [](int) { end_program(); });
  }
  Watchdog(const Watchdog&) = delete;
  ~Watchdog() { ::alarm(0); }

  /// Starts the limit of kLimitS for a test. A process that the test forks has no limit.
  void begin(const std::string& test) {
    std::snprintf(name_, sizeof(name_), "%s", test.c_str());
    ::alarm(kLimitS);
  }

 private:
  static void end_program() {
    std::fprintf(stderr, "HANGS   %s: no end after %u s. Its threads:\n", name_, kLimitS);
    if (DIR* tasks = ::opendir("/proc/self/task")) {
      while (const dirent* entry = ::readdir(tasks)) {
        const long thread = std::strtol(entry->d_name, nullptr, 10);
        if (thread == 0) continue;
        std::fprintf(stderr, "thread %ld\n", thread);
        ::syscall(SYS_tgkill, ::getpid(), thread, SIGUSR2);
        ::usleep(100000);  // so that the stacks of two threads do not mix
      }
    }
    std::abort();
  }

  inline static char name_[256];
};

}  // namespace sparkhvd::test
