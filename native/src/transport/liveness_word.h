// A word in shared memory that tells the end of a rank's process, however it ends: the kernel sets it
// when the process's threads go, which is before it frees the memory and closes the connections (4 GiB
// take it a third of a second).
//
// **Ownership.** The rank's progress thread holds the word from its start to its end; the others only
// look.
#pragma once

#include <linux/futex.h>
#include <pthread.h>

namespace sparkhvd {

/// Lies in shared memory, where zero is what everything starts with.
class LivenessWord {
 public:
  /// Before the others look.
  void open() noexcept {
    pthread_mutexattr_t attributes;
    ::pthread_mutexattr_init(&attributes);
    ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    // A kernel without such mutexes: the end of the connection tells.
    [[maybe_unused]] const int result = ::pthread_mutex_init(&mutex_, &attributes);
    ::pthread_mutexattr_destroy(&attributes);
  }

  void hold() noexcept { ::pthread_mutex_lock(&mutex_); }
  void release() noexcept { ::pthread_mutex_unlock(&mutex_); }

  /// True if the thread that held it has gone without releasing it.
  bool has_ended() const noexcept {
    const int word = __atomic_load_n(&mutex_.__data.__lock, __ATOMIC_ACQUIRE);
    return (static_cast<unsigned>(word) & FUTEX_OWNER_DIED) != 0;
  }

 private:
  pthread_mutex_t mutex_;
};

}  // namespace sparkhvd
