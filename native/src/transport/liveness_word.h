// A word in shared memory that shows the end of a rank's process, for any cause: the kernel sets it when the
// process's threads end, before it frees the memory (a third of a second for 4 GiB) and closes the
// connections.
//
// **Ownership.** The rank's progress thread holds the word from its start to its end; the others only read.
#pragma once

#include <linux/futex.h>
#include <pthread.h>

namespace sparkhvd {

/// In shared memory, where all values start as zero.
class LivenessWord {
 public:
  /// Before the others read.
  void open() noexcept {
    pthread_mutexattr_t attributes;
    ::pthread_mutexattr_init(&attributes);
    ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    // A kernel without robust mutexes: the end of the connection shows it.
    [[maybe_unused]] const int result = ::pthread_mutex_init(&mutex_, &attributes);
    ::pthread_mutexattr_destroy(&attributes);
  }

  void hold() noexcept { ::pthread_mutex_lock(&mutex_); }
  void release() noexcept { ::pthread_mutex_unlock(&mutex_); }

  /// True if its holder has ended without releasing it.
  bool has_ended() const noexcept {
    const int word = __atomic_load_n(&mutex_.__data.__lock, __ATOMIC_ACQUIRE);
    return (static_cast<unsigned>(word) & FUTEX_OWNER_DIED) != 0;
  }

 private:
  pthread_mutex_t mutex_;
};

}  // namespace sparkhvd
