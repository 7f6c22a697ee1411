// Mutexes for clang's -Wthread-safety check: the compiler rejects an access to GUARDED_BY data without their mutex.
// Other compilers see std::mutex and std::unique_lock.
#pragma once

#include <condition_variable>
#include <mutex>

#include "clock.h"

#if defined(__clang__)
#define SPARKHVD_THREAD_SAFETY(x) __attribute__((x))
#else
#define SPARKHVD_THREAD_SAFETY(x)
#endif

#define GUARDED_BY(x) SPARKHVD_THREAD_SAFETY(guarded_by(x))
#define REQUIRES(...) SPARKHVD_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) SPARKHVD_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) SPARKHVD_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define RELEASE(...) SPARKHVD_THREAD_SAFETY(release_capability(__VA_ARGS__))

namespace sparkhvd {

class SPARKHVD_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class Lock;
  std::mutex mutex_;
};

/// Holds a mutex until the end of its scope; may release it in between.
class SPARKHVD_THREAD_SAFETY(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() RELEASE() {}

  void lock() ACQUIRE() { lock_.lock(); }
  void unlock() RELEASE() { lock_.unlock(); }

  /// Releases the mutex, waits for a notification, and locks it again. False if `deadline` came first.
  bool wait(std::condition_variable& changed, TimePoint deadline) {
    if (deadline != kNever)
      return changed.wait_until(lock_, deadline) == std::cv_status::no_timeout;
    changed.wait(lock_);
    return true;
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace sparkhvd
