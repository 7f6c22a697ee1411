// The driver of the engine: its choice, its waits and its steps (see engine.h).
#include <sched.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "engine.h"
#include "text.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparkhvd {
namespace {

// Once no caller has driven for this long, and at most twice as long, the progress thread takes
// over. Waking it after every one of a series of calls would cost more than the calls; so does
// setting a timer each time (5 us in a virtual machine), so one that runs is left alone.
constexpr auto kTakeOverTime = std::chrono::microseconds(200);
// The same while nothing is in flight here: peers get their answers, and no rank waits for bytes.
constexpr auto kIdleTakeOverTime = std::chrono::milliseconds(10);
constexpr std::uint32_t kFailedSpins = 100;
constexpr std::uint32_t kFailedSpinsOfNetwork = 3;
// Ranks that share CPUs spin by letting each other run: handing a CPU over costs less than waking a
// rank that sleeps.
constexpr auto kCrowdedSpin = std::chrono::milliseconds(1);
// Time that a thread that waits for a launch looks at nothing else.
constexpr auto kLaunchTime = std::chrono::microseconds(20);
constexpr auto kTrialPeriod = std::chrono::milliseconds(16);
constexpr auto kTrialTime = std::chrono::milliseconds(1);

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

}  // namespace

/// A rank waits according to the CPUs that its host's ranks may use.
void Engine::choose_spinning() {
  const auto shares = world_->cpu_shares();
  is_crowded_ = !have_cpus(shares, 1);
  has_cpu_for_plane_ = have_cpus(shares, 2);
  if (is_crowded_ && spin_ > Clock::duration::zero())
    spin_ = std::max<Clock::duration>(spin_, kCrowdedSpin);
  max_failed_spins_ = world_->team().is_one_island() ? kFailedSpins : kFailedSpinsOfNetwork;
}

// ---- The driver ------------------------------------------------------------------------------

void Engine::become_driver(const std::unique_lock<std::mutex>& lock) {
  [[maybe_unused]] const bool is_held = lock.owns_lock();
  has_driver_ = true;
  if (is_watching_) {
    outer_poller_.modify(poller_.fd(), 0, kNestedKey);
    is_watching_ = false;
  }
  bell_.set_awake();
  recorder_.woke();
}

void Engine::stop_driving(const std::unique_lock<std::mutex>& lock) {
  [[maybe_unused]] const bool is_held = lock.owns_lock();
  has_driver_ = false;
  ++drives_;
  start_timer(lock);
  if (waiters_ > 0) changed_.notify_all();
}

void Engine::start_timer(const std::unique_lock<std::mutex>& lock) {
  [[maybe_unused]] const bool is_held = lock.owns_lock();
  const bool is_idle = in_flight_.empty() && !abort_request_;
  if (is_timer_running_ && (is_idle || !is_timer_idle_)) return;
  itimerspec time{};
  time.it_value.tv_nsec =
      std::chrono::nanoseconds(is_idle ? kIdleTakeOverTime : kTakeOverTime).count();
  if (::timerfd_settime(timer_.get(), 0, &time, nullptr) != 0) throw_errno("timerfd_settime");
  is_timer_running_ = true;
  is_timer_idle_ = is_idle;
}

void Engine::run_progress_thread() {
  TimePoint deadline = kNever;
  std::uint64_t drives_seen = 0;
  while (true) {
    bool interrupted = false;
    bool is_timer = false;
    const auto& events = outer_poller_.wait(milliseconds_until(deadline), interrupted);
    const bool is_called = !events.empty();
    for (const auto& event : events) {
      std::uint64_t count = 0;
      if (event.data.u64 != kTimerKey) continue;
      [[maybe_unused]] const auto result = ::read(timer_.get(), &count, sizeof(count));
      is_timer = true;
    }
    deadline = kNever;
    std::unique_lock lock(mutex_);
    if (is_stopping_) return;
    if (is_timer) is_timer_running_ = false;
    // A caller that drives starts the timer when it stops.
    if (has_driver_) continue;
    if (is_timer && std::exchange(drives_seen, drives_) != drives_) {
      start_timer(lock);
      continue;
    }
    has_driver_ = true;
    bell_.set_awake();
    lock.unlock();
    const bool is_idle = progress_until_idle(is_called);
    const TimePoint wake_up = std::min(next_deadline(), next_look());
    lock.lock();
    if (is_idle && inbox_.empty() && !abort_request_ && !is_stopping_) {
      deadline = wake_up;
      has_driver_ = false;
      if (!is_watching_) outer_poller_.modify(poller_.fd(), EPOLLIN, kNestedKey);
      is_watching_ = true;
      if (waiters_ > 0) changed_.notify_all();
    } else {
      stop_driving(lock);
    }
  }
}

/// Drives until there is nothing to do (true) or a caller wants to drive (false). `is_called`: something
/// has happened.
bool Engine::progress_until_idle(bool is_called) {
  TimePoint spin_end = Clock::now() + (is_called ? spin_ : Clock::duration::zero());
  must_look_ = true;  // what woke this thread may be a connection
  protect([this] { return look_for_ended(); });
  while (!hand_over_.load(std::memory_order_relaxed)) {
    if (try_step(Work::kAll)) {
      spin_end = Clock::now() + spin_;
      continue;
    }
    // A thread without waiters spins only in the middle of an operation that all ranks are
    // in.
    if (is_running() && Clock::now() < spin_end) {
      relax(is_crowded_);
      continue;
    }
    if (announce_sleep()) return true;
  }
  return false;
}

namespace {

bool has_finished(const Operation& operation) { return operation.is_finished(); }

/// The plane's thread has it and needs a few microseconds, in which nothing else is worth a look.
/// It has a CPU of its own, unless other programs take that: so it is let run here, too. A CPU that
/// they have taken may come back milliseconds later, and then everything else comes first.
bool await_launch(const Operation& operation) {
  const TimePoint end = Clock::now() + kLaunchTime;
  do {
    if (nccl::is_launched(operation)) return true;
    relax(true);
  } while (Clock::now() < end);
  return nccl::is_launched(operation);
}

}  // namespace

void Engine::wait(Operation& operation, TimePoint deadline) {
  if (operation.is_finished()) return;
  std::unique_lock lock(mutex_);
  wait(lock, operation, deadline, has_finished);
}

void Engine::wait_launched(Operation& operation, TimePoint deadline) {
  const Reached reached = [](const Operation& one) {
    return one.is_finished() || nccl::is_launched(one);
  };
  if (reached(operation)) return;
  std::unique_lock lock(mutex_);
  wait(lock, operation, deadline, reached);
}

void Engine::run(std::shared_ptr<Operation> operation, TimePoint deadline) {
  std::unique_lock lock(mutex_);
  accept(lock, operation);
  wait(lock, *operation, deadline, has_finished);
}

void Engine::wait(std::unique_lock<std::mutex>& lock, Operation& operation, TimePoint deadline,
                  Reached reached) {
  ++waiters_;
  // A launch that the ranks have agreed on is a matter of microseconds, and of a thread of this process
  // that may need the CPU.
  const auto is_launching = [&] {
    return has_cpu_for_plane_ && reached != &has_finished && operation.on_device->is_with_plane;
  };
  const auto patience = [&] { return is_launching() ? spin_ : spin_time(); };
  while (!reached(operation) && !is_stopping_) {
    if (has_driver_) {
      hand_over_.store(true, std::memory_order_relaxed);
      recorder_.activity().waits.add();
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) break;
      continue;
    }
    if (!is_stopping_) hand_over_.store(false, std::memory_order_relaxed);
    become_driver(lock);
    lock.unlock();
    bool stop = false;
    bool is_spinning = false;
    TimePoint spin_end = Clock::now() + patience();
    while (!reached(operation) && !stop) {
      if (try_step(Work::kAll)) {
        if (std::exchange(is_spinning, false)) {
          failed_spins_ = 0;
          recorder_.activity().spins.add();
        }
        const auto now = Clock::now();
        spin_end = now + patience();
        stop = now >= deadline;
        continue;
      }
      const auto now = Clock::now();
      if (now >= deadline) {
        stop = true;
      } else if (now < spin_end) {
        is_spinning = !is_launching();
        if (is_spinning) {
          relax(is_crowded_);
        } else if (await_launch(operation)) {
          break;
        }
      } else {
        if (std::exchange(is_spinning, false)) {
          ++failed_spins_;
          recorder_.activity().failed_spins.add();
        }
        stop = sleep_until(deadline);
        spin_end = Clock::now() + patience();
      }
    }
    lock.lock();
    stop_driving(lock);
    if (stop) break;
  }
  --waiters_;
  if (waiters_ == 0 && !is_stopping_) hand_over_.store(false, std::memory_order_relaxed);
}

/// Between hosts the CPU that spins may be the one that the network's work needs: after a few
/// fruitless spins in a row, waiters sleep at once. On one host it takes many: who sleeps makes the
/// others wait for its wake-up, so that they sleep too, and small operations would cost a wake-up each
/// from then on. They try again in the first of every 16 ms, by a clock that the processes of a host
/// share, because a spin meets an answer in time only if the peer spins too.
Clock::duration Engine::spin_time() const {
  if (failed_spins_ < max_failed_spins_) return spin_;
  const bool is_trial = Clock::now().time_since_epoch() % kTrialPeriod < kTrialTime;
  return is_trial ? spin_ : Clock::duration::zero();
}

/// Sleeps until something happens. True if a signal or the deadline ended it.
bool Engine::sleep_until(TimePoint deadline) {
  if (!announce_sleep()) return false;
  {
    std::unique_lock lock(mutex_);
    if (!inbox_.empty() || abort_request_ || is_stopping_) {
      bell_.set_awake();
      return is_stopping_;
    }
    driver_sleeps_ = true;
  }
  recorder_.activity().waits.add();
  bool interrupted = false;
  const bool moved = protect([&] {
    const TimePoint end = std::min(deadline, next_deadline());
    bool has_moved = false;
    do {
      has_moved = poll_links(milliseconds_until(std::min(end, next_look())), interrupted);
      if (!has_failed_) has_moved |= look_for_ended();
    } while (!has_moved && !interrupted && !has_failed_ && Clock::now() < end);
    // The caller may have got what it waits for, and not step again.
    if (!has_failed_) flush_links();
    return has_moved;
  });
  {
    std::unique_lock lock(mutex_);
    driver_sleeps_ = false;
    if (is_stopping_) interrupted = true;
  }
  bell_.set_awake();
  return interrupted || (!moved && Clock::now() >= deadline);
}

/// Tells the peers of this host and the plane to ring, if they matter at all. False if there is
/// something to do after all.
bool Engine::announce_sleep() {
  if (!is_running() && !listens() && plane() == nullptr && !messages_->is_waiting()) return true;
  bell_.set_sleeping();
  if (!try_step(Work::kAll)) return true;
  bell_.set_awake();
  return false;
}

// ---- A step ----------------------------------------------------------------------------------

/// One round over everything that can move. True if something did.
bool Engine::step(Work work) {
  // What others have told before this rank's own submissions: a join must not be passed by an answer to
  // them that does without what its rank submitted before.
  bool moved = hear_device();
  moved |= !has_failed_ && receive_shared();
  moved |= take_inbox();
  if (has_failed_) {
    bool interrupted = false;
    return poll_links(0, interrupted) || moved;
  }
  if (work == Work::kAll) {
    if (messages_->is_waiting()) {
      moved |= receive_messages();
      if (has_failed_) return true;
      moved |= messages_->step();
    }
    moved |= run_operations();
    // On one host the shared memory matters, not the sockets: looking at them costs a system call.
    const bool must_look = std::exchange(must_look_, false);
    moved |= must_look;
    // Orders for devices come on a connection, if there is another rank.
    const bool takes_orders = plane() != nullptr && world_->size() > 1;
    if (must_look || takes_orders || !is_all_shared() || ++steps_ % 8 == 0) {
      bool interrupted = false;
      moved |= poll_links(0, interrupted);
    }
  }
  if (has_failed_) return true;
  moved |= flush_links(work);
  moved |= check_time();
  return moved;
}

/// Door of the driver: whatever goes wrong inside fails the engine, and every operation with it.
template <class Body>
bool Engine::protect(Body body) noexcept {
  try {
    try {
      return body();
    } catch (const Error& error) {
      fail(error.status(), error.what());
    } catch (const std::exception& error) {
      fail(SPARKHVD_INTERNAL,
           rank_text(rank_) + " failed inside the engine: " + error.what() + ".");
    }
  } catch (...) {
    fail_without_memory();
  }
  return true;
}

bool Engine::try_step(Work work) noexcept {
  return protect([&] { return step(work); });
}

bool Engine::take_inbox() {
  std::vector<std::shared_ptr<Operation>> inbox;
  std::optional<std::string> abort_reason;
  {
    const std::scoped_lock lock(mutex_);
    if (inbox_.empty() && !abort_request_) return false;
    inbox.swap(inbox_);
    abort_reason.swap(abort_request_);
  }
  for (auto& operation : inbox) {
    if (has_failed_) {
      finish(*operation, failure_->status(), operation->label() + ": " + failure_->what());
      continue;
    }
    if (Group* group = find_group(operation->process_set)) {
      submit_to(*group, std::move(operation));
    } else {
      finish(*operation, SPARKHVD_INVALID_ARGUMENT,
             operation->label() + ": its process set was removed.");
    }
  }
  if (abort_reason && !has_failed_) {
    fail(SPARKHVD_SHUT_DOWN, rank_text(rank_) + " aborted: " + *abort_reason);
  }
  return true;
}

bool Engine::run_operations() {
  bool moved = false;
  // Process sets take turns: one that waits does not stop another.
  for (auto entry = groups_.begin(); entry != groups_.end() && !has_failed_;) {
    Group& group = *entry->second;
    while (!group.running.empty() && !has_failed_ && run_first(group)) moved = true;
    if (group.is_removed && group.running.empty() && is_device_done(group)) {
      if (auto* device = plane()) device->remove(group.id);
      for (auto& link : world_->data_links()) link.forget(group.id);
      broken_.erase(group.id);
      entry = groups_.erase(entry);
    } else {
      ++entry;
    }
  }
  return moved;
}

bool Engine::is_running() const {
  return std::ranges::any_of(groups_,
                             [](const auto& entry) { return !entry.second->running.empty(); });
}

TimePoint Engine::next_deadline() const {
  TimePoint next =
      std::min({next_device_deadline(), loss_watch_.next(), messages_->next_deadline()});
  for (const auto& [rank, suspect] : suspects_) next = std::min(next, suspect.until);
  for (const auto& [id, group] : groups_) {
    if (group->negotiation) next = std::min(next, group->negotiation->next_deadline());
    if (!group->running.empty()) next = std::min(next, group->running.front().deadline);
    for (const auto& [name, operation] : group->submitted) {
      next = std::min(next, operation->give_up_at);
    }
  }
  return next;
}

bool Engine::check_time() {
  const auto deadline = next_deadline();
  if (deadline == kNever) return false;
  const auto now = Clock::now();
  if (now < deadline) return false;
  look_for_losses(now);
  if (!has_failed_) messages_->check_time(now);
  for (auto& [id, group] : groups_) {
    if (has_failed_ || !check_time(*group, now)) break;
  }
  return true;
}

/// False if the engine has failed.
bool Engine::check_time(Group& group, TimePoint now) {
  if (group.negotiation) apply(group, group.negotiation->tick(now));
  if (!group.running.empty() && now >= group.running.front().deadline) {
    const auto& running = group.running.front();
    const auto* waiting = running.context ? running.context->schedule.waiting : nullptr;
    const auto ranks = waiting == nullptr ? std::vector<Rank>{} : waiting->awaited();
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g", running.operation->descriptor.timeout_s);
    fail(SPARKHVD_TIMEOUT, running.operation->label() + ": " + rank_text(rank_) + " waited " +
                               seconds + " s for " +
                               (ranks.empty() ? "the network" : rank_list(ranks)) +
                               ", which took part but stopped in the middle of it. The process may "
                               "be stopped or starved of CPU.");
    return false;
  }
  for (const auto& [name, operation] : group.submitted) {
    if (now < operation->give_up_at || asks_for_life(group, *operation, now)) continue;
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g", operation->coordinator_patience_s());
    fail(SPARKHVD_TIMEOUT, operation->label() + ": " + rank_text(group.coordinator()) +
                               ", which coordinates, has not answered within " + seconds +
                               " s. Its process may be stopped or starved of CPU.");
    return false;
  }
  return true;
}

}  // namespace sparkhvd
