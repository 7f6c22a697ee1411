#include "engine.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string_view>

#include "text.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparkhvd {
namespace {

constexpr std::uint64_t kBellKey = UINT64_MAX;
// What the progress thread waits for.
constexpr std::uint64_t kNestedKey = 0;
constexpr std::uint64_t kControlKey = 1;
constexpr std::uint64_t kTimerKey = 2;
// Once no caller has driven for this long, and at most twice as long, the progress thread takes
// over. Waking it after every one of a series of calls would cost more than the calls; so does
// setting a timer each time (5 us in a virtual machine), so one that runs is left alone.
constexpr auto kTakeOverTime = std::chrono::microseconds(200);
// The same while nothing is in flight here: peers get their answers, and nobody waits for bytes.
constexpr auto kIdleTakeOverTime = std::chrono::milliseconds(10);
constexpr std::uint32_t kFailedSpins = 100;
constexpr std::uint32_t kFailedSpinsOfNetwork = 3;
// Ranks that share CPUs spin by letting each other run: handing a CPU over costs less than waking a
// rank that sleeps.
constexpr auto kCrowdedSpin = std::chrono::milliseconds(1);
constexpr auto kTrialPeriod = std::chrono::milliseconds(16);
constexpr auto kTrialTime = std::chrono::milliseconds(1);
// Bytes from one connection before the others get their turn.
constexpr std::size_t kReadBudget = 1 << 20;
// How long shutdown waits for peers to read the goodbye. Live peers take microseconds.
constexpr auto kGoodbyeTime = std::chrono::seconds(1);

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

int milliseconds_until(TimePoint deadline) {
  if (deadline == kNever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3600 * 1000));
}

// A round trip below this is one of a local network.
constexpr std::uint32_t kLocalRoundTrip_us = 1000;

/// On a local network losses are repaired within a round trip, and what counts is CPU time per byte:
/// BBR costs more than twice as much as Reno (16 MiB each way over veth: 24 against 10 ms of CPU on
/// both ranks together), and every process may use Reno. Far away the system's choice stands, and so
/// does any choice but BBR.
void choose_congestion_control(int fd) {
  char name[16] = {};
  socklen_t size = sizeof(name) - 1;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return;
  if (!std::string_view(name).starts_with("bbr")) return;
  tcp_info info{};
  size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  if (info.tcpi_rtt == 0 || info.tcpi_rtt > kLocalRoundTrip_us) return;
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/// Options of connections between hosts. Errors are ignored: the connection works without.
void tune_socket(int fd, double host_loss_s) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return;
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return;
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof(value));
  };
  const int loss_s = std::max(3, static_cast<int>(host_loss_s));
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  choose_congestion_control(fd);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, loss_s / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, loss_s / 3));
  set(IPPROTO_TCP, TCP_KEEPCNT, 2);
  // The kernel counts from the first retransmission, which comes 0.2 s after what is lost, later on
  // a busy host.
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, loss_s * 1000 - 500);
}

bool ignore_frame(FrameType, std::span<const std::byte>) { return true; }

const Kernels& kernels_or_error(std::int32_t isa) {
  if (!isa_available(isa)) {
    throw Error(SPARKHVD_UNSUPPORTED,
                "instruction set " + std::to_string(isa) +
                    " is not available on this CPU or in this build. Use isa='auto'.");
  }
  return kernels(isa);
}

}  // namespace

Engine::Engine(EngineOptions options)
    : rank_(options.world.rank),
      size_(options.world.hosts.size()),
      kernels_(kernels_or_error(options.isa)),
      spin_(std::chrono::microseconds(options.spin_us)),
      stall_shutdown_s_(options.stall_shutdown_s),
      recorder_(rank_, size_),
      stacks_(options.stack_signal, options.stack_pipe),
      control_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      stall_warning_s_(options.stall_warning_s),
      watched_(options.sockets.size()),
      said_goodbye_(size_, false) {
  if (!control_.valid()) throw_errno("eventfd");
  if (!timer_.valid()) throw_errno("timerfd_create");
  for (const auto& socket : options.sockets) {
    if (socket.valid()) tune_socket(socket.get(), options.host_loss_s);
  }
  std::vector<std::string> warnings;
  world_.emplace(std::move(options.world), std::move(options.sockets), bell_, warnings);
  for (const auto& warning : warnings) warn(warning);
  const long cpus = ::sysconf(_SC_NPROCESSORS_ONLN);
  // Between hosts the wait is the network's, whose work needs the CPU too.
  const bool is_one_host = world_->team().is_one_island();
  is_crowded_ = is_one_host && static_cast<long>(world_->team().local_size()) > cpus;
  has_cpu_for_plane_ = 2 * static_cast<long>(world_->team().local_size()) <= cpus;
  if (is_crowded_ && spin_ > Clock::duration::zero())
    spin_ = std::max<Clock::duration>(spin_, kCrowdedSpin);
  max_failed_spins_ = is_one_host ? kFailedSpins : kFailedSpinsOfNetwork;
  open_group(std::make_unique<Group>(0, world_->team()));
  groups_.at(0)->communicator.emplace(*world_, 0, world_->team(), world_->memory(),
                                      World::kMemoryOffset);
  announce(world_->team(), 0);
  poller_.add(bell_.fd(), EPOLLIN, kBellKey);
  outer_poller_.add(poller_.fd(), EPOLLIN, kNestedKey);
  outer_poller_.add(control_.get(), EPOLLIN, kControlKey);
  outer_poller_.add(timer_.get(), EPOLLIN, kTimerKey);
  bell_.count(recorder_.activity().wakeups);
  for (auto& link : world_->links()) {
    link.count(recorder_.activity().sockets);
    if (link.is_open()) watch(link);
  }
  // What arrived behind the handshake is already buffered and would not wake the thread.
  bell_.ring_self();
  thread_ = std::jthread([this] { run_progress_thread(); });
}

Engine::~Engine() { shutdown(); }

// ---- Who drives
// ------------------------------------------------------------------------------------------

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
    for (const auto& event : outer_poller_.wait(milliseconds_until(deadline), interrupted)) {
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
    const bool is_idle = progress_until_idle();
    lock.lock();
    if (is_idle && inbox_.empty() && !abort_request_ && !is_stopping_) {
      deadline = next_deadline();
      has_driver_ = false;
      if (!is_watching_) outer_poller_.modify(poller_.fd(), EPOLLIN, kNestedKey);
      is_watching_ = true;
      if (waiters_ > 0) changed_.notify_all();
    } else {
      stop_driving(lock);
    }
  }
}

/// Drives until there is nothing to do (true) or a caller wants to drive (false).
bool Engine::progress_until_idle() {
  TimePoint spin_end = Clock::now() + spin_;
  must_look_ = true;  // what woke this thread may be a connection
  while (!hand_over_.load(std::memory_order_relaxed)) {
    if (try_step(Work::kAll)) {
      spin_end = Clock::now() + spin_;
      continue;
    }
    // A thread that nobody waits for spins only in the middle of an operation that all ranks are
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

bool is_launched(const Operation& operation) {
  return operation.on_device && operation.on_device->is_launched.load(std::memory_order_acquire);
}

/// The plane's thread has it and needs a few microseconds, in which nothing else is worth a look.
/// It has a CPU of its own, if no other program takes that: so it is let run here, too.
bool await_launch(const Operation& operation) {
  constexpr int kLooks = 20;
  for (int look = 0; look < kLooks; ++look) {
    if (is_launched(operation)) return true;
    relax(true);
  }
  return is_launched(operation);
}

}  // namespace

void Engine::wait(Operation& operation, TimePoint deadline) {
  if (operation.is_finished()) return;
  std::unique_lock lock(mutex_);
  wait(lock, operation, deadline, has_finished);
}

void Engine::wait_launched(Operation& operation, TimePoint deadline) {
  const Reached reached = [](const Operation& one) {
    return one.is_finished() || is_launched(one);
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
        if (!is_spinning && await_launch(operation)) break;
        relax(is_crowded_ || !is_spinning);
      } else {
        if (std::exchange(is_spinning, false)) {
          ++failed_spins_;
          recorder_.activity().vain_spins.add();
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
  bool moved = false;
  try {
    moved = poll_links(milliseconds_until(std::min(deadline, next_deadline())), interrupted);
    // The caller may have got what it waits for, and not step again.
    if (!has_failed_) flush_links();
  } catch (const std::exception& error) {
    fail(SPARKHVD_INTERNAL, error.what());
  }
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
  if (!is_running() && !listens() && plane() == nullptr) return true;
  bell_.set_sleeping();
  if (!try_step(Work::kAll)) return true;
  bell_.set_awake();
  return false;
}

// ---- Calls
// -----------------------------------------------------------------------------------------------

void Engine::check() const {
  if (is_forked_copy()) throw created_before_fork();
  const std::scoped_lock lock(mutex_);
  if (failure_) throw *failure_;
}

void Engine::accept(const std::unique_lock<std::mutex>& lock,
                    std::shared_ptr<Operation> operation) {
  [[maybe_unused]] const bool is_held = lock.owns_lock();
  if (failure_) throw Error(failure_->status(), operation->label() + ": " + failure_->what());
  const auto members = members_.find(operation->process_set);
  for (const Rank rank : departed_) {
    if (members != members_.end() && std::ranges::count(*members->second, rank) == 0) continue;
    throw Error(SPARKHVD_SHUT_DOWN,
                departure_text(operation->descriptor.collective, operation->name, rank));
  }
  auto& of_this_name = in_flight_[{operation->process_set, operation->name}];
  // What is on the device already needs its name no more: the host may be many steps ahead of a GPU.
  if (of_this_name && !is_launched(*of_this_name)) {
    throw Error(SPARKHVD_INVALID_ARGUMENT,
                operation->label() +
                    ": an operation of this name is in flight on this rank. Wait for it, or use "
                    "another name.");
  }
  of_this_name = operation;
  recorder_.submitted(*operation);
  inbox_.push_back(std::move(operation));
  if (has_driver_ && driver_sleeps_) bell_.ring_self();
}

void Engine::submit(std::shared_ptr<Operation> operation) {
  std::unique_lock lock(mutex_);
  accept(lock, std::move(operation));
  if (has_driver_) return;
  become_driver(lock);
  lock.unlock();
  try_step(Work::kControl);
  lock.lock();
  stop_driving(lock);
}

std::shared_ptr<const std::vector<Rank>> Engine::members(std::int32_t process_set) const {
  const std::scoped_lock lock(mutex_);
  const auto entry = members_.find(process_set);
  if (entry == members_.end()) {
    throw Error(
        SPARKHVD_INVALID_ARGUMENT,
        "process set " + std::to_string(process_set) +
            " does not exist. Add it on every rank first, and use it before it is removed.");
  }
  if (std::ranges::count(*entry->second, rank_) == 0) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, rank_text(rank_) + " is not in process set " +
                                               std::to_string(process_set) + ", which has " +
                                               rank_list(*entry->second) +
                                               ". Only its ranks may call operations on it.");
  }
  return entry->second;
}

void Engine::abort(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (failure_) return;
  abort_request_ = reason;
  if (has_driver_) {
    if (driver_sleeps_) bell_.ring_self();
    return;
  }
  become_driver(lock);
  lock.unlock();
  try_step(Work::kControl);
  lock.lock();
  stop_driving(lock);
}

void Engine::shutdown() {
  const std::scoped_lock once(shutdown_mutex_);
  std::unique_lock lock(mutex_);
  if (is_shut_down_) return;
  is_stopping_ = true;
  hand_over_.store(true, std::memory_order_relaxed);
  bell_.ring_self();
  changed_.notify_all();
  ++waiters_;
  changed_.wait(lock, [this] { return !has_driver_; });
  --waiters_;
  become_driver(lock);
  const bool is_aborted = abort_request_.has_value();
  lock.unlock();
  // The reason for an abort must not be lost to a shutdown right behind it.
  if (is_aborted) try_step(Work::kControl);
  try {
    say_goodbye();
  } catch (const std::exception& error) {
    // Leaving must succeed: the peers see the connection end.
    warn(rank_text(rank_) + " could not say goodbye: " + error.what());
    for (auto& link : world_->links()) link.close();
  }
  stop_device();
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(control_.get(), &one, sizeof(one));
  thread_.join();
  recorder_.stop_timeline();
  lock.lock();
  has_driver_ = false;
  is_shut_down_ = true;
  changed_.notify_all();
}

void Engine::say_goodbye() {
  hear_device();  // what has ended on the device belongs into the goodbye
  if (!has_failed_) {
    fail_all(SPARKHVD_SHUT_DOWN, "the engine of " + rank_text(rank_) +
                                     " was shut down while the operation was in flight.");
    Goodbye goodbye;
    for (const auto& [id, group] : groups_) {
      goodbye.sets.push_back({id, group->executed, group->device.finished});
    }
    for (auto& link : world_->control_links()) {
      if (link.is_open()) link.send(encode(goodbye));
    }
    // What has ended here may need this rank's communicators on the others for a moment.
    if (!on_plane_.empty()) abort_device();
  }
  const TimePoint deadline = Clock::now() + kGoodbyeTime;
  // A connection is closed when the peer has nothing more to say: closing earlier could destroy
  // what it has not read yet, be it the goodbye or the cause of a failure.
  while (true) {
    std::vector<pollfd> polls;
    for (auto& link : world_->links()) {
      if (!link.is_open()) continue;
      const bool had_output = link.wants_write();
      link.flush();
      if (had_output && !link.wants_write()) link.close_write();
      link.read(ignore_frame, kReadBudget);
      if (link.state() != Link::State::kOpen) {
        unwatch(link);
        link.close();
        continue;
      }
      const short out = link.wants_write() ? POLLOUT : short{0};
      polls.push_back({link.fd(), static_cast<short>(POLLIN | out), 0});
    }
    if (polls.empty() || Clock::now() >= deadline) break;
    ::poll(polls.data(), polls.size(), milliseconds_until(deadline));
  }
  for (auto& link : world_->links()) link.close();
}

void Engine::after_fork() noexcept {
  // The mutex may be held by a thread that does not exist here: no locks, no epoll_ctl (the epoll
  // instances are shared with the parent), only the copies of the descriptors.
  is_forked_copy_.store(true, std::memory_order_relaxed);
  world_->close_descriptors();
  stacks_.close();
  bell_.close();
  poller_.close();
  outer_poller_.close();
  control_.reset();
  timer_.reset();
}

// ---- The driver's step
// -----------------------------------------------------------------------------------

/// One round over everything that can move. True if something did.
bool Engine::step(Work work) {
  // What others have told before this rank's own submissions: a join must not be passed by an answer to
  // them that does without what its rank submitted before.
  bool moved = hear_device();
  moved |= !has_failed_ && hear();
  moved |= take_inbox();
  if (has_failed_) {
    bool interrupted = false;
    return poll_links(0, interrupted) || moved;
  }
  if (work == Work::kAll) {
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
  moved |= flush_links();
  moved |= check_time();
  return moved;
}

/// Door of the driver: whatever goes wrong inside fails the engine, and every operation with it.
bool Engine::try_step(Work work) noexcept {
  try {
    try {
      return step(work);
    } catch (const Error& error) {
      fail(error.status(), error.what());
    } catch (const std::exception& error) {
      fail(SPARKHVD_INTERNAL,
           rank_text(rank_) + " failed inside the engine: " + error.what() + ".");
    }
  } catch (...) {
    // Out of memory while failing: the operations stay pending, and the peers see the connection
    // end.
    has_failed_ = true;
    for (auto& link : world_->links()) link.close();
  }
  return true;
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

bool Engine::poll_links(int timeout_ms, bool& interrupted) {
  bool moved = false;
  // Bytes that were read together with earlier ones make no event.
  for (auto& link : world_->links()) {
    if (!has_failed_ && link.is_open() && link.has_buffered()) {
      moved |= read_link(link);
      timeout_ms = 0;
      if (has_failed_) return true;
    }
  }
  for (const auto& event : poller_.wait(timeout_ms, interrupted)) {
    if (event.data.u64 == kBellKey) {
      // Counts as movement: what it was rung for may have come after this round looked, and a peer
      // rings once per sleep.
      bell_.clear();
      moved = true;
      continue;
    }
    Link& link = world_->links()[event.data.u64];
    if (!link.is_open()) continue;
    if (has_failed_) {
      moved |= link.read(ignore_frame, kReadBudget);
      part_with(link);
      continue;
    }
    if ((event.events & EPOLLOUT) != 0) moved |= link.flush();
    if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) moved |= read_link(link);
    if (has_failed_) return true;
    if (link.is_open()) watch(link);
  }
  return moved;
}

bool Engine::read_link(Link& link) {
  const bool moved = link.read(
      [this, &link](FrameType type, std::span<const std::byte> body) {
        handle(link, type, body);
        return !has_failed_;
      },
      kReadBudget);
  if (has_failed_) return true;
  if (link.state() != Link::State::kOpen) {
    on_link_end(link);
    return true;
  }
  // An answer goes out at once, so that a connection that takes it needs no other epoll events.
  link.flush();
  watch(link);
  return moved;
}

bool Engine::flush_links() {
  bool moved = false;
  for (auto& link : world_->links()) {
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= link.flush();
    watch(link);
  }
  return moved;
}

void Engine::watch(Link& link) {
  const auto index = static_cast<std::size_t>(&link - world_->links().data());
  std::uint32_t wanted = 0;
  if (link.wants_read()) wanted |= EPOLLIN;
  if (link.wants_write()) wanted |= EPOLLOUT;
  // The end of a connection is reported even to those who ask for nothing, over and over.
  if (wanted == 0) return unwatch(link);
  if (watched_[index] == wanted) return;
  if (watched_[index].has_value()) {
    poller_.modify(link.fd(), wanted, index);
  } else {
    poller_.add(link.fd(), wanted, index);
  }
  watched_[index] = wanted;
}

void Engine::unwatch(Link& link) {
  const auto index = static_cast<std::size_t>(&link - world_->links().data());
  if (watched_[index].has_value()) poller_.remove(link.fd());
  watched_[index].reset();
}

bool Engine::run_operations() {
  bool moved = false;
  // Process sets take turns: one that waits does not stop another.
  for (auto entry = groups_.begin(); entry != groups_.end() && !has_failed_;) {
    Group& group = *entry->second;
    while (!group.running.empty() && !has_failed_ && run_first(group)) moved = true;
    if (group.is_removed && group.running.empty() && is_device_done(group)) {
      if (auto* device = plane()) device->remove(group.id);
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
  TimePoint next = next_device_deadline();
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
  for (auto& [id, group] : groups_) {
    if (!check_time(*group, now)) break;
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

// ---- Endings
// ---------------------------------------------------------------------------------------------

void Engine::finish(Operation& operation, std::int32_t status, std::string message) {
  recorder_.finished(operation, status, message);
  operation.message = std::move(message);
  const std::scoped_lock lock(mutex_);
  const auto entry = in_flight_.find({operation.process_set, operation.name});
  // A later operation may have taken the name.
  if (entry != in_flight_.end() && entry->second.get() == &operation) in_flight_.erase(entry);
  operation.status.store(status, std::memory_order_release);
  if (waiters_ > 0) changed_.notify_all();
}

void Engine::fail_all(std::int32_t status, const std::string& message) {
  // Links first: nothing may be written to a tensor once its operation is finished.
  for (auto& link : world_->links()) link.cancel_lent();
  for (auto& [id, group] : groups_) {
    group->running.clear();
    group->submitted.clear();
  }
  // All that is in flight, wherever it was when something went wrong: nobody may wait for ever.
  std::vector<std::shared_ptr<Operation>> operations;
  {
    const std::scoped_lock lock(mutex_);
    failure_.emplace(status, message);
    for (const auto& [key, operation] : in_flight_) operations.push_back(operation);
    inbox_.clear();
  }
  for (auto& operation : operations) {
    // The device may still write to its tensors: it ends with the communicators.
    if (operation->on_device && operation->on_device->is_with_plane) continue;
    const std::string label = operation->label() + ": ";
    finish(*operation, status, message.starts_with(label) ? message : label + message);
  }
}

void Engine::fail(std::int32_t status, const std::string& message) {
  if (has_failed_) return;
  has_failed_ = true;
  for (auto& [id, group] : groups_) group->negotiation.reset();
  fail_all(status, message);
  abort_device();
  const bool is_abort = status == SPARKHVD_SHUT_DOWN;
  const Bytes frame = encode(Abort{is_abort ? SPARKHVD_PEER_LOST : status, message});
  for (auto& link : world_->control_links()) {
    if (link.is_open()) link.send(frame);
  }
  for (auto& link : world_->links()) {
    if (link.is_open()) part_with(link);
  }
}

/// After a failure: the first cause travels before the end of the connection, so that nobody takes
/// this rank for it, however long the peer needs to make room. Meanwhile what the peer sends is read
/// and dropped, because it may need room too. The socket stays open for reading: closing it with
/// unread bytes would reset it and lose the message.
void Engine::part_with(Link& link) {
  link.flush();
  if (link.wants_write() && link.state() == Link::State::kOpen) return watch(link);
  link.close_write();
  unwatch(link);
}

void Engine::warn(const std::string& text) const {
  std::fprintf(stderr, "sparkhvd warning: %s\n", text.c_str());
}

Error created_before_fork() {
  return {SPARKHVD_SHUT_DOWN,
          "this engine was created before fork and does not work in the forked child. Start an "
          "engine of "
          "its own in the child, or use it in the parent only."};
}

std::string Operation::label() const { return operation_label(descriptor.collective, name); }

}  // namespace sparkhvd
