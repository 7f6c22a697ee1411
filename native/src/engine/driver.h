// The driver: at most one thread at a time drives, and only the driver uses connections, negotiation and running
// collectives.
//
// **Threads.** Any number of callers and one progress thread. A waiting thread becomes the driver if no thread drives;
// the progress thread drives when no thread waits. While a caller drives, the progress thread sleeps undisturbed,
// because its epoll does not watch the connections. If no caller returns for a fraction of a millisecond, a timer
// wakes it. A submission drives just far enough to notify the other ranks.
//
// **Ownership.** `mutex_` guards the role of the driver; it may be held while others are locked, never the reverse.
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

/// The driver's interface to its parts. Called by the driver, except `has_requests` and `is_idle`.
class Drivable {
 public:
  virtual ~Drivable() = default;
  /// One round over all pending work. True if anything moved.
  virtual bool step(Work work) noexcept = 0;
  /// Checks the cause of a wakeup: connections, and ended processes.
  virtual void look() noexcept = 0;
  /// Sleeps until an event, its own deadline, or `deadline`. True if anything moved.
  virtual bool sleep(TimePoint deadline, bool& interrupted) noexcept = 0;
  /// True in the middle of an operation that all ranks have started.
  virtual bool is_running() const = 0;
  /// True if the wakeup event may signal.
  virtual bool expects_bell() const = 0;
  /// Deadline of a thread that sleeps outside.
  virtual TimePoint wake_up() const = 0;

  // Any thread.

  /// True if the driver has not taken a caller's request.
  virtual bool has_requests() const = 0;
  /// True if no caller waits for anything.
  virtual bool is_idle() const = 0;
};

/// A thread's wait condition.
class WaitCondition {
 public:
  virtual ~WaitCondition() = default;
  virtual bool is_reached() const = 0;
  /// True if it takes microseconds, in a thread of this process that may need the CPU.
  virtual bool is_imminent() const { return false; }
  /// Polls only this for a moment. True if it holds.
  virtual bool await() const { return is_reached(); }
};

/// How a thread waits before it sleeps.
struct Spinning {
  Clock::duration time{};
  bool is_crowded = false;  // this host has more ranks than CPUs for them
  std::uint32_t max_failed =
      0;  // consecutive spins that ended in sleep, until a thread sleeps at once
};

/// Relaxes the CPU for a moment, or yields to another thread.
void relax(bool lets_others_run) noexcept;

class Driver {
 public:
  /// Descriptors of the progress thread. Created before the ranks connect, so that a rank without free descriptors
  /// fails before others depend on it.
  struct Descriptors {
    Descriptors();
    Poller poller;  // the connections, while no other thread drives
    Fd control;     // wakes the progress thread itself
    Fd timer;       // wakes it when a caller has stopped driving and does not return
  };
  /// `connections`: an epoll that reports pending work.
  Driver(Descriptors descriptors, Drivable& driven, WakeupEvent& wakeup, Recorder& recorder,
         int connections, const Spinning& spinning);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  /// The progress thread's body, until `take_for_good`.
  void run_progress_thread() EXCLUDES(mutex_);
  /// After a request: ensures that the other ranks are notified.
  void serve() EXCLUDES(mutex_);
  /// Drives until the condition holds, `deadline`, a signal, or the end. `has_requested`: directly after a request.
  void wait(const WaitCondition& goal, TimePoint deadline, bool has_requested) EXCLUDES(mutex_);
  /// Wait conditions of other threads may hold.
  void notify() EXCLUDES(mutex_);
  /// Becomes the last driver. The progress thread ends as soon as it is woken.
  void take_for_good() EXCLUDES(mutex_);
  void wake_progress_thread() noexcept;
  /// Ends driving for all threads.
  void release() EXCLUDES(mutex_);
  /// In a forked child: closes the descriptors without a lock, whose holder may not exist here.
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
  std::atomic<bool> hand_over_{false};  // a caller waits for the progress thread to stop driving
  std::uint32_t failed_spins_ =
      0;  // the driver's: consecutive spins of waiters that ended in sleep

  Mutex mutex_;
  std::condition_variable changed_;
  std::size_t waiters_ GUARDED_BY(mutex_) = 0;
  bool has_driver_ GUARDED_BY(mutex_) = false;
  bool driver_sleeps_ GUARDED_BY(mutex_) = false;
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  bool is_timer_running_ GUARDED_BY(mutex_) = false;
  bool is_timer_idle_ GUARDED_BY(mutex_) = false;  // it runs for the longer time
  std::uint64_t drives_ GUARDED_BY(mutex_) = 0;    // times that a caller has stopped driving
  bool is_watching_ GUARDED_BY(mutex_) = true;     // `poller_` watches the connections
};

}  // namespace sparkhvd
