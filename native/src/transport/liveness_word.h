// A word in shared memory that shows the end of a rank's process, for any cause. It is a robust mutex: the kernel marks
// it when the threads of the process end. This is before the kernel frees the process's memory (a third of a second for
// 4 GiB) and closes the connections.
//
// **Ownership.** The rank's progress thread holds the word from its start to its end. Other ranks only read it.
#pragma once

#include <linux/futex.h>
#include <pthread.h>

namespace sparkhvd {

/// The word lies in shared memory with initial values of zero.
class LivenessWord {
 public:
  /// Initializes the word; call it before other ranks read it.
  void open() noexcept {
    pthread_mutexattr_t attributes;
    ::pthread_mutexattr_init(&attributes);
    ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    // Without robust mutexes in the kernel this fails. Other ranks then see only the end of the connection.
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
