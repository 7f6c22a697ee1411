// Who works for all: at most one thread at a time is the driver, and only the driver touches connections,
// negotiation and running collectives.
//
// **Threads.** Any number of callers and one progress thread. A waiting thread becomes the driver if there is none;
// the progress thread drives when no thread waits. While a caller drives, the progress thread sleeps undisturbed,
// because its epoll does not watch the connections then; once no caller has come back for a fraction of a
// millisecond, a timer wakes it. A submission drives just far enough to tell the other ranks.
//
// **Ownership.** `mutex_` guards who drives; it may be held while others are taken, never the reverse.
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

/// All that the driver knows of what it drives. Called by the driver, but for `has_requests` and `is_idle`.
class Drivable {
 public:
  virtual ~Drivable() = default;
  /// One round over everything that can move. True if something did.
  virtual bool step(Work work) noexcept = 0;
  /// Looks at what woke a thread: connections, and processes that have ended.
  virtual void look() noexcept = 0;
  /// Sleeps until something happens, a deadline of its own, or `deadline`. True if something moved.
  virtual bool sleep(TimePoint deadline, bool& interrupted) noexcept = 0;
  /// True in the middle of an operation that all ranks are in.
  virtual bool is_running() const = 0;
  /// True if anything may come by the wakeup.
  virtual bool expects_bell() const = 0;
  /// When a thread that sleeps outside has to look again.
  virtual TimePoint wake_up() const = 0;

  // Any thread.

  /// True if a caller has asked for something that the driver has not taken.
  virtual bool has_requests() const = 0;
  /// True if no caller waits for anything.
  virtual bool is_idle() const = 0;
};

/// What a thread waits for.
class WaitCondition {
 public:
  virtual ~WaitCondition() = default;
  virtual bool is_reached() const = 0;
  /// True if it is a matter of microseconds, and of a thread of this process that may need the CPU.
  virtual bool is_imminent() const { return false; }
  /// Looks at nothing else for a moment. True if it was reached.
  virtual bool await() const { return is_reached(); }
};

/// How a thread waits before it sleeps.
struct Spinning {
  Clock::duration time{};
  bool is_crowded = false;  // this host has more ranks than CPUs for them
  std::uint32_t max_failed =
      0;  // spins in a row that ended in sleep, until a thread sleeps at once
};

/// Lets a CPU do something else for a moment, or another thread run.
void relax(bool lets_others_run) noexcept;

class Driver {
 public:
  /// What the progress thread waits for. Made before the ranks meet: a rank that can open no more descriptors says
  /// so before others count on it.
  struct Descriptors {
    Descriptors();
    Poller poller;  // the connections, while no other thread drives
    Fd control;     // wakes the progress thread itself
    Fd timer;       // wakes it when a caller has stopped driving and does not come back
  };
  /// `connections`: an epoll that says when there is something to do.
  Driver(Descriptors descriptors, Drivable& driven, WakeupEvent& wakeup, Recorder& recorder,
         int connections, const Spinning& spinning);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  /// The progress thread's body, until `take_for_good`.
  void run_progress_thread() EXCLUDES(mutex_);
  /// After a request: makes sure that somebody has told the other ranks.
  void serve() EXCLUDES(mutex_);
  /// Drives until the goal is reached, `deadline`, a signal, or the end. `has_requested`: right after a request.
  void wait(const WaitCondition& goal, TimePoint deadline, bool has_requested) EXCLUDES(mutex_);
  /// Something may have been reached that other threads wait for.
  void notify() EXCLUDES(mutex_);
  /// Becomes the last driver. The progress thread ends as soon as it is woken.
  void take_for_good() EXCLUDES(mutex_);
  void wake_progress_thread() noexcept;
  /// No thread drives any more.
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
  std::uint32_t failed_spins_ = 0;      // the driver's: waiters' spins in a row that ended in sleep

  Mutex mutex_;
  std::condition_variable changed_;
  std::size_t waiters_ GUARDED_BY(mutex_) = 0;
  bool has_driver_ GUARDED_BY(mutex_) = false;
  bool driver_sleeps_ GUARDED_BY(mutex_) = false;
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  bool is_timer_running_ GUARDED_BY(mutex_) = false;
  bool is_timer_idle_ GUARDED_BY(mutex_) = false;  // it runs for the longer time
  std::uint64_t drives_ GUARDED_BY(mutex_) = 0;    // how often a caller has stopped driving
  bool is_watching_ GUARDED_BY(mutex_) = true;     // `poller_` watches the connections
};

}  // namespace sparkhvd
