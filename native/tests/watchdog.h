// Ends the test program if a test hangs, and shows the stacks of all threads (addr2line has their lines).
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
  /// Far more than the longest test takes where threads are watched and CPUs shared.
  static constexpr unsigned kLimitS = 240;

  Watchdog() {
    void* frames[1];
    ::backtrace(frames, 1);  // loads what it needs, which a signal's handler must not
    ::signal(SIGUSR2, [](int) {
      void* stack[64];
      ::backtrace_symbols_fd(stack, ::backtrace(stack, 64), STDERR_FILENO);
    });
    ::signal(SIGALRM, [](int) { end_program(); });
  }
  Watchdog(const Watchdog&) = delete;
  ~Watchdog() { ::alarm(0); }

  /// From now on this test has kLimitS. A process that it forks has no limit of its own.
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
        ::usleep(100000);  // one after the other
      }
    }
    std::abort();
  }

  inline static char name_[256];
};

}  // namespace sparkhvd::test
