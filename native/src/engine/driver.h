// The driver: the thread that does the engine's work. At most one thread drives at a time, and only this thread uses
// connections, negotiation and running collectives.
//
// **Threads.** Any number of callers and one progress thread. A waiting thread becomes the driver if no thread drives;
// the progress thread drives when no thread waits. While a caller drives, the progress thread sleeps undisturbed,
// because its epoll instance does not watch the connections. If no caller drives for a fraction of a millisecond, a
// timer wakes the progress thread. A submission drives just far enough to notify the other ranks.
//
// **Ownership.** `mutex_` guards the role of the driver. A thread may lock other mutexes while it holds `mutex_`, but
// must not lock `mutex_` while it holds another mutex.
//
// **Shutdown.** `take_for_good` makes the calling thread the last driver, and lets the progress thread end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>

#include "clock.h"
#include "recorder.h"
#include "sync.h"
#include "transport/fd.h"
#include "transport/poller.h"
#include "transport/wakeup_event.h"

namespace sparkhvd {

enum class Work : std::uint8_t { kControl, kAll };

/// The work that the driver does. Only the driver's thread calls it, except `has_requests` and `is_idle`.
class Drivable {
 public:
  virtual ~Drivable() = default;
  /// Does one round over all pending work. True if anything changed.
  virtual bool step(Work work) noexcept = 0;
  /// Looks for the cause of a wakeup: readable connections, and ended processes.
  virtual void look() noexcept = 0;
  /// Sleeps until an event, its own next deadline, or `deadline`. True if anything changed.
  virtual bool sleep(TimePoint deadline, bool& interrupted) noexcept = 0;
  /// True while an operation runs that all ranks have started.
  virtual bool is_running() const = 0;
  /// True if a peer or the plane may signal the wakeup event.
  virtual bool expects_bell() const = 0;
  /// Time at which the sleeping progress thread must wake up.
  virtual TimePoint wake_up() const = 0;

  // Any thread.

  /// True if a caller's request waits for the driver.
  virtual bool has_requests() const = 0;
  /// True if no operation is in flight and no abort is requested.
  virtual bool is_idle() const = 0;
};

/// The condition that a caller's thread waits for.
class WaitCondition {
 public:
  virtual ~WaitCondition() = default;
  virtual bool is_reached() const = 0;
  /// True if another thread of this process fulfils the condition within microseconds; it may need this thread's CPU.
  virtual bool is_imminent() const { return false; }
  /// Polls only this condition for a moment. True if it holds.
  virtual bool await() const { return is_reached(); }
};

/// How a thread waits before it sleeps.
struct Spinning {
  Clock::duration time{};
  bool is_crowded = false;  // this host has more ranks than CPUs for them
  // After this number of consecutive spins that ended in sleep, a thread sleeps without spinning.
  std::uint32_t max_failed = 0;
};

/// Pauses the CPU for a moment, or yields to another thread.
void relax(bool lets_others_run) noexcept;

class Driver {
 public:
  /// Descriptors of the progress thread. They are created before the ranks connect, so that a rank without free
  /// descriptors fails before other ranks depend on it.
  struct Descriptors {
    Descriptors();
    Poller poller;  // watches the connections while no other thread drives
    Fd control;     // wakes the progress thread itself
    Fd timer;       // wakes it when a caller has stopped driving and does not return
  };
  /// `connections`: descriptor of an epoll instance that reports pending work.
  Driver(Descriptors descriptors, Drivable& driven, WakeupEvent& wakeup, Recorder& recorder,
         int connections, const Spinning& spinning);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  /// The progress thread's body, until `take_for_good`.
  void run_progress_thread() EXCLUDES(mutex_);
  /// Ensures that the other ranks hear of a request.
  void serve() EXCLUDES(mutex_);
  /// Drives until the condition holds, `deadline`, a signal, or the engine's end. `has_requested`: the caller has just
  /// made a request.
  void wait(const WaitCondition& goal, TimePoint deadline, bool has_requested) EXCLUDES(mutex_);
  /// Wakes waiting threads, because their conditions may hold.
  void notify() EXCLUDES(mutex_);
  /// Becomes the last driver. The progress thread ends as soon as it is woken.
  void take_for_good() EXCLUDES(mutex_);
  void wake_progress_thread() noexcept;
  /// Ends driving for all threads.
  void release() EXCLUDES(mutex_);
  /// Closes the descriptors in a forked child. It takes no lock, because the lock's holder may not exist in the child.
  void after_fork() noexcept;

 private:
  void become_driver() REQUIRES(mutex_);
  void stop_driving() REQUIRES(mutex_);
  void start_timer() REQUIRES(mutex_);
  void wake_sleeper() REQUIRES(mutex_);
  bool progress_until_idle(bool is_called);
  bool drive_to(const WaitCondition& goal, TimePoint deadline);
  Clock::duration patience(const WaitCondition& goal) const;
  bool sleep_until(TimePoint deadline) EXCLUDES(mutex_);
  bool announce_sleep();

  Drivable& driven_;
  WakeupEvent& wakeup_;
  Recorder& recorder_;
  const int connections_;
  const Spinning spinning_;
  Descriptors own_;
  std::atomic<bool> hand_over_{false};  // a caller waits until the progress thread stops driving
  std::uint32_t failed_spins_ =
      0;  // the driver's: consecutive spins of waiters that ended in sleep

  Mutex mutex_;
  std::condition_variable changed_;
  std::size_t waiters_ GUARDED_BY(mutex_) = 0;
  bool has_driver_ GUARDED_BY(mutex_) = false;
  bool driver_sleeps_ GUARDED_BY(mutex_) = false;
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  bool is_timer_running_ GUARDED_BY(mutex_) = false;
  bool is_timer_idle_ GUARDED_BY(mutex_) = false;  // the timer is set to kIdleTakeOverTime
  std::uint64_t drives_ GUARDED_BY(mutex_) = 0;    // how often a caller has stopped driving
  bool is_watching_ GUARDED_BY(mutex_) = true;     // the poller watches the connections
};

}  // namespace sparkhvd
