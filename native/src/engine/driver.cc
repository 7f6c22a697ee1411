#include "engine/driver.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparkhvd {
namespace {

// The progress thread takes over when no caller has driven for this time, or at most twice this time. Waking it after
// every call of a series would cost more than the calls. Setting a timer each time would too (5 us in a virtual
// machine), so a running timer is kept.
constexpr auto kTakeOverTime = std::chrono::microseconds(200);
// Take-over time if ranks share CPUs: a wakeup takes a CPU from a working rank, and callers return later.
constexpr auto kCrowdedTakeOverTime = std::chrono::milliseconds(1);
// Take-over time while nothing is in flight here: no rank waits for this rank's bytes, only for answers.
constexpr auto kIdleTakeOverTime = std::chrono::milliseconds(10);
constexpr auto kTrialPeriod = std::chrono::milliseconds(16);
constexpr auto kTrialTime = std::chrono::milliseconds(1);

// Keys of the events that the progress thread waits for.
constexpr std::uint64_t kConnectionsKey = 0;
constexpr std::uint64_t kControlKey = 1;
constexpr std::uint64_t kTimerKey = 2;

}  // namespace

void relax(bool lets_others_run) noexcept {
  if (lets_others_run) {
    ::sched_yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Driver::Descriptors::Descriptors()
    : control(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!control.valid()) throw_errno("eventfd");
  if (!timer.valid()) throw_errno("timerfd_create");
}

Driver::Driver(Descriptors descriptors, Drivable& driven, WakeupEvent& wakeup, Recorder& recorder,
               int connections, const Spinning& spinning)
    : driven_(driven),
      wakeup_(wakeup),
      recorder_(recorder),
      connections_(connections),
      spinning_(spinning),
      own_(std::move(descriptors)) {
  own_.poller.add(connections_, EPOLLIN, kConnectionsKey);
  own_.poller.add(own_.control.get(), EPOLLIN, kControlKey);
  own_.poller.add(own_.timer.get(), EPOLLIN, kTimerKey);
}

// ---- Who drives ------------------------------------------------------------------------------

void Driver::become_driver() {
  has_driver_ = true;
  if (is_watching_) {
    own_.poller.modify(connections_, 0, kConnectionsKey);
    is_watching_ = false;
  }
  wakeup_.set_awake();
  recorder_.woke();
}

void Driver::stop_driving() {
  has_driver_ = false;
  ++drives_;
  start_timer();
  if (waiters_ > 0) changed_.notify_all();
}

void Driver::start_timer() {
  const bool is_idle = driven_.is_idle();
  if (is_timer_running_ && (is_idle || !is_timer_idle_)) return;
  itimerspec time{};
  std::chrono::nanoseconds longest = spinning_.is_crowded ? kCrowdedTakeOverTime : kTakeOverTime;
  if (is_idle) longest = kIdleTakeOverTime;
  time.it_value.tv_nsec = longest.count();
  if (::timerfd_settime(own_.timer.get(), 0, &time, nullptr) != 0) throw_errno("timerfd_settime");
  is_timer_running_ = true;
  is_timer_idle_ = is_idle;
}

void Driver::wake_sleeper() {
  if (has_driver_ && driver_sleeps_) wakeup_.ring_self();
}

void Driver::serve() {
  Lock lock(mutex_);
  if (has_driver_) return wake_sleeper();
  become_driver();
  lock.unlock();
  driven_.step(Work::kControl);
  lock.lock();
  stop_driving();
}

void Driver::notify() {
  const Lock lock(mutex_);
  if (waiters_ > 0) changed_.notify_all();
}

void Driver::take_for_good() {
  Lock lock(mutex_);
  is_stopping_ = true;
  hand_over_.store(true, std::memory_order_relaxed);
  wakeup_.ring_self();
  changed_.notify_all();
  ++waiters_;
  while (has_driver_) lock.wait(changed_, kNever);
  --waiters_;
  become_driver();
}

void Driver::wake_progress_thread() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(own_.control.get(), &one, sizeof(one));
}

void Driver::release() {
  const Lock lock(mutex_);
  has_driver_ = false;
  changed_.notify_all();
}

void Driver::after_fork() noexcept {
  // No epoll_ctl: the child shares the epoll instance with the parent.
  own_.poller.close();
  own_.control.reset();
  own_.timer.reset();
}

// ---- The progress thread ---------------------------------------------------------------------

void Driver::run_progress_thread() {
  TimePoint deadline = kNever;
  std::uint64_t drives_seen = 0;
  while (true) {
    bool interrupted = false;
    bool is_timer = false;
    const auto& events = own_.poller.wait(milliseconds_until(deadline), interrupted);
    const bool is_called = !events.empty();
    for (const auto& event : events) {
      std::uint64_t count = 0;
      if (event.data.u64 != kTimerKey) continue;
      [[maybe_unused]] const auto result = ::read(own_.timer.get(), &count, sizeof(count));
      is_timer = true;
    }
    deadline = kNever;
    Lock lock(mutex_);
    if (is_stopping_) return;
    if (is_timer) is_timer_running_ = false;
    // A driving caller starts the timer when it stops.
    if (has_driver_) continue;
    if (is_timer && std::exchange(drives_seen, drives_) != drives_) {
      start_timer();
      continue;
    }
    has_driver_ = true;
    wakeup_.set_awake();
    lock.unlock();
    const bool is_idle = progress_until_idle(is_called);
    const TimePoint wake_up = driven_.wake_up();
    lock.lock();
    if (is_idle && !is_stopping_ && !driven_.has_requests()) {
      deadline = wake_up;
      has_driver_ = false;
      if (!is_watching_) own_.poller.modify(connections_, EPOLLIN, kConnectionsKey);
      is_watching_ = true;
      if (waiters_ > 0) changed_.notify_all();
    } else {
      stop_driving();
    }
  }
}

/// Drives until there is no work (returns true) or a caller wants to drive (returns false). `is_called`: an event has
/// woken the thread.
bool Driver::progress_until_idle(bool is_called) {
  TimePoint spin_end = Clock::now() + (is_called ? spinning_.time : Clock::duration::zero());
  driven_.look();
  while (!hand_over_.load(std::memory_order_relaxed)) {
    if (driven_.step(Work::kAll)) {
      spin_end = Clock::now() + spinning_.time;
      continue;
    }
    // No caller waits, so the progress thread spins only while an operation runs that all ranks have started.
    if (driven_.is_running() && Clock::now() < spin_end) {
      relax(spinning_.is_crowded);
      continue;
    }
    if (announce_sleep()) return true;
  }
  return false;
}

// ---- Waiting callers -------------------------------------------------------------------------

void Driver::wait(const WaitCondition& goal, TimePoint deadline, bool has_requested) {
  Lock lock(mutex_);
  if (has_requested) wake_sleeper();
  ++waiters_;
  while (!goal.is_reached() && !is_stopping_) {
    if (has_driver_) {
      hand_over_.store(true, std::memory_order_relaxed);
      recorder_.activity().waits.add();
      if (!lock.wait(changed_, deadline)) break;
      continue;
    }
    hand_over_.store(false, std::memory_order_relaxed);
    become_driver();
    lock.unlock();
    const bool stop = drive_to(goal, deadline);
    lock.lock();
    stop_driving();
    if (stop) break;
  }
  --waiters_;
  if (waiters_ == 0 && !is_stopping_) hand_over_.store(false, std::memory_order_relaxed);
}

/// Drives until the condition holds. True if the deadline, a signal or the engine's end came first.
bool Driver::drive_to(const WaitCondition& goal, TimePoint deadline) {
  bool is_spinning = false;
  TimePoint spin_end = Clock::now() + patience(goal);
  while (!goal.is_reached()) {
    if (driven_.step(Work::kAll)) {
      if (std::exchange(is_spinning, false)) {
        failed_spins_ = 0;
        recorder_.activity().spins.add();
      }
      const auto now = Clock::now();
      if (now >= deadline) return !goal.is_reached();
      spin_end = now + patience(goal);
      continue;
    }
    const auto now = Clock::now();
    if (now >= deadline) return true;
    if (now < spin_end) {
      is_spinning = !goal.is_imminent();
      if (is_spinning) {
        relax(spinning_.is_crowded);
      } else if (goal.await()) {
        return false;
      }
      continue;
    }
    if (std::exchange(is_spinning, false)) {
      ++failed_spins_;
      recorder_.activity().failed_spins.add();
    }
    if (sleep_until(deadline)) return true;
    spin_end = Clock::now() + patience(goal);
  }
  return false;
}

/// Time for which a waiter spins before it sleeps.
///
/// Between hosts the network's work may need the CPU, so waiters stop spinning after a few consecutive spins without
/// success. On one host they stop only after many: if a rank sleeps, the other ranks wait for its wakeup and sleep too,
/// and from then on every small operation costs a wakeup. A spin succeeds only if the peer spins too. So waiters spin
/// again in the first millisecond of every 16 ms, by a clock that all processes of a host share.
Clock::duration Driver::patience(const WaitCondition& goal) const {
  if (failed_spins_ < spinning_.max_failed || goal.is_imminent()) return spinning_.time;
  const bool is_trial = Clock::now().time_since_epoch() % kTrialPeriod < kTrialTime;
  return is_trial ? spinning_.time : Clock::duration::zero();
}

/// Sleeps until an event. True if a signal, the deadline or the engine's end ended the sleep.
bool Driver::sleep_until(TimePoint deadline) {
  if (!announce_sleep()) return false;
  {
    const Lock lock(mutex_);
    driver_sleeps_ = !is_stopping_ && !driven_.has_requests();
    if (!driver_sleeps_) {
      wakeup_.set_awake();
      return is_stopping_;
    }
  }
  recorder_.activity().waits.add();
  bool interrupted = false;
  const bool moved = driven_.sleep(deadline, interrupted);
  {
    const Lock lock(mutex_);
    driver_sleeps_ = false;
    if (is_stopping_) interrupted = true;
  }
  wakeup_.set_awake();
  return interrupted || (!moved && Clock::now() >= deadline);
}

/// Announces the sleep to the peers of this host and to the plane, if they may have to wake this thread. False if new
/// work has arrived meanwhile.
bool Driver::announce_sleep() {
  if (!driven_.is_running() && !driven_.expects_bell()) return true;
  wakeup_.set_sleeping();
  if (!driven_.step(Work::kAll)) return true;
  wakeup_.set_awake();
  return false;
}

}  // namespace sparkhvd
