#include "engine.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <stdexcept>

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
constexpr std::uint32_t kFailedSpins = 3;
constexpr auto kTrialPeriod = std::chrono::milliseconds(16);
constexpr auto kTrialTime = std::chrono::milliseconds(1);
// Bytes from one connection before the others get their turn.
constexpr std::size_t kReadBudget = 1 << 20;
// How long shutdown waits for peers to read the goodbye. Live peers take microseconds.
constexpr auto kGoodbyeTime = std::chrono::seconds(1);
// An operation whose coordinator does not even answer fails this much later than the coordinator
// would say.
constexpr double kCoordinatorGrace_s = 5;

void relax() noexcept {
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
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, loss_s / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, loss_s / 3));
  set(IPPROTO_TCP, TCP_KEEPCNT, 2);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, loss_s * 1000);
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
    : rank_(options.communicator.rank),
      size_(options.communicator.hosts.size()),
      kernels_(kernels_or_error(options.isa)),
      spin_(std::chrono::microseconds(options.spin_us)),
      stall_shutdown_s_(options.stall_shutdown_s),
      control_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      watched_(size_),
      said_goodbye_(size_, false) {
  if (!control_.valid()) throw_errno("eventfd");
  if (!timer_.valid()) throw_errno("timerfd_create");
  for (const auto& socket : options.sockets) {
    if (socket.valid()) tune_socket(socket.get(), options.host_loss_s);
  }
  std::vector<std::string> warnings;
  communicator_.emplace(std::move(options.communicator), std::move(options.sockets), bell_,
                        warnings);
  for (const auto& warning : warnings) warn(warning);
  if (is_coordinator()) {
    Negotiation::Options negotiation;
    for (std::size_t i = 0; i < size_; ++i) {
      negotiation.members.push_back(Rank{static_cast<std::int32_t>(i)});
    }
    negotiation.stall_warning_s = options.stall_warning_s;
    negotiation_.emplace(std::move(negotiation));
  }
  poller_.add(bell_.fd(), EPOLLIN, kBellKey);
  outer_poller_.add(poller_.fd(), EPOLLIN, kNestedKey);
  outer_poller_.add(control_.get(), EPOLLIN, kControlKey);
  outer_poller_.add(timer_.get(), EPOLLIN, kTimerKey);
  for (auto& link : communicator_->links()) {
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
  if (is_timer_running_) return;
  itimerspec time{};
  time.it_value.tv_nsec = std::chrono::nanoseconds(kTakeOverTime).count();
  if (::timerfd_settime(timer_.get(), 0, &time, nullptr) != 0) throw_errno("timerfd_settime");
  is_timer_running_ = true;
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
  while (!hand_over_.load(std::memory_order_relaxed)) {
    if (try_step(Work::kAll)) {
      spin_end = Clock::now() + spin_;
      continue;
    }
    // A thread that nobody waits for spins only in the middle of an operation that all ranks are
    // in.
    if (!running_.empty() && Clock::now() < spin_end) {
      relax();
      continue;
    }
    if (announce_sleep()) return true;
  }
  return false;
}

void Engine::wait(Operation& operation, TimePoint deadline) {
  if (operation.is_finished()) return;
  std::unique_lock lock(mutex_);
  ++waiters_;
  while (!operation.is_finished() && !is_stopping_) {
    if (has_driver_) {
      hand_over_.store(true, std::memory_order_relaxed);
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) break;
      continue;
    }
    if (!is_stopping_) hand_over_.store(false, std::memory_order_relaxed);
    become_driver(lock);
    lock.unlock();
    bool stop = false;
    bool is_spinning = false;
    TimePoint spin_end = Clock::now() + spin_time();
    while (!operation.is_finished() && !stop) {
      if (try_step(Work::kAll)) {
        if (std::exchange(is_spinning, false)) failed_spins_ = 0;
        const auto now = Clock::now();
        spin_end = now + spin_time();
        stop = now >= deadline;
        continue;
      }
      const auto now = Clock::now();
      if (now >= deadline) {
        stop = true;
      } else if (now < spin_end) {
        is_spinning = true;
        relax();
      } else {
        if (std::exchange(is_spinning, false)) ++failed_spins_;
        stop = sleep_until(deadline);
        spin_end = Clock::now() + spin_time();
      }
    }
    lock.lock();
    stop_driving(lock);
    if (stop) break;
  }
  --waiters_;
  if (waiters_ == 0 && !is_stopping_) hand_over_.store(false, std::memory_order_relaxed);
}

/// Where a peer has no CPU of its own, spinning only keeps it from running: after a few fruitless
/// spins in a row, waiters sleep at once. They try again in the first of every 16 ms, by a clock that
/// the processes of a host share, because a spin meets an answer in time only if the peer spins too.
Clock::duration Engine::spin_time() const {
  if (failed_spins_ < kFailedSpins) return spin_;
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
  bool interrupted = false;
  bool moved = false;
  try {
    moved = poll_links(milliseconds_until(std::min(deadline, next_deadline())), interrupted);
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

/// Tells the peers of this host to ring, if they matter at all. False if there is something to do
/// after all.
bool Engine::announce_sleep() {
  if (running_.empty()) return true;
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

void Engine::submit(std::shared_ptr<Operation> operation) {
  std::unique_lock lock(mutex_);
  if (failure_) throw Error(failure_->status(), operation->label() + ": " + failure_->what());
  if (!departed_.empty()) {
    throw Error(SPARKHVD_SHUT_DOWN, departure_text(operation->descriptor.collective,
                                                   operation->name, departed_.front()));
  }
  if (!names_.insert(operation->name).second) {
    throw Error(SPARKHVD_INVALID_ARGUMENT,
                operation->label() +
                    ": an operation of this name is in flight on this rank. Wait for it, or use "
                    "another name.");
  }
  inbox_.push_back(std::move(operation));
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
    for (auto& link : communicator_->links()) link.close();
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(control_.get(), &one, sizeof(one));
  thread_.join();
  lock.lock();
  has_driver_ = false;
  is_shut_down_ = true;
  changed_.notify_all();
}

void Engine::say_goodbye() {
  if (!has_failed_) {
    fail_all(SPARKHVD_SHUT_DOWN, "the engine of " + rank_text(rank_) +
                                     " was shut down while the operation was in flight.");
    for (auto& link : communicator_->links()) {
      if (link.is_open()) link.send(encode(Goodbye{executed_}));
    }
  }
  const TimePoint deadline = Clock::now() + kGoodbyeTime;
  // A connection is closed when the peer has nothing more to say: closing earlier could destroy
  // what it has not read yet, be it the goodbye or the cause of a failure.
  while (true) {
    std::vector<pollfd> polls;
    for (auto& link : communicator_->links()) {
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
  for (auto& link : communicator_->links()) link.close();
}

void Engine::after_fork() noexcept {
  // The mutex may be held by a thread that does not exist here: no locks, no epoll_ctl (the epoll
  // instances are shared with the parent), only the copies of the descriptors.
  is_forked_copy_.store(true, std::memory_order_relaxed);
  communicator_->close_descriptors();
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
  bool moved = take_inbox();
  if (has_failed_) {
    bool interrupted = false;
    return poll_links(0, interrupted) || moved;
  }
  if (work == Work::kAll) {
    moved |= run_operations();
    // In the middle of an operation in shared memory the counters matter, not the sockets: looking
    // at them costs a system call.
    const bool is_local = !running_.empty() && communicator_->islands().size() == 1;
    if (moved || !is_local || ++steps_ % 8 == 0) {
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
    for (auto& link : communicator_->links()) link.close();
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
    if (said_goodbye_[0]) {
      finish(*operation, SPARKHVD_SHUT_DOWN,
             departure_text(operation->descriptor.collective, operation->name, Rank{0}));
      continue;
    }
    const double patience_s = operation->descriptor.timeout_s + kCoordinatorGrace_s;
    const bool is_bounded = operation->descriptor.timeout_s > 0 && !is_coordinator();
    operation->give_up_at = deadline_after(Clock::now(), is_bounded ? patience_s : 0);
    submitted_.emplace(operation->name, operation);
    send_to_coordinator(*operation);
  }
  if (abort_reason && !has_failed_) {
    fail(SPARKHVD_SHUT_DOWN, rank_text(rank_) + " aborted: " + *abort_reason);
  }
  return true;
}

void Engine::send_to_coordinator(const Operation& operation) {
  Ready ready{operation.process_set, operation.name, operation.descriptor};
  if (is_coordinator()) {
    apply(negotiation_->ready(rank_, std::move(ready), Clock::now()));
  } else {
    communicator_->link(Rank{0}).send(encode(ready));
  }
}

bool Engine::poll_links(int timeout_ms, bool& interrupted) {
  bool moved = false;
  // Bytes that were read together with earlier ones make no event.
  for (auto& link : communicator_->links()) {
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
    Link& link = communicator_->link(Rank{static_cast<std::int32_t>(event.data.u64)});
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
        handle(link.peer(), type, body);
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
  for (auto& link : communicator_->links()) {
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= link.flush();
    watch(link);
  }
  return moved;
}

void Engine::watch(Link& link) {
  const auto index = static_cast<std::size_t>(index_of(link.peer()));
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
  const auto index = static_cast<std::size_t>(index_of(link.peer()));
  if (watched_[index].has_value()) poller_.remove(link.fd());
  watched_[index].reset();
}

bool Engine::run_operations() {
  bool moved = false;
  while (!running_.empty() && !has_failed_) {
    Running& running = *running_.front();
    const double timeout_s = running.operation->descriptor.timeout_s;
    if (!running.is_started) {
      running.is_started = true;
      if (running.operation->descriptor.collective != Collective::kBarrier) {
        running.task = run_collective(running.context);
      }
      if (!running.task.done()) running.task.resume();
      running.deadline = deadline_after(Clock::now(), timeout_s);
      moved = true;
    } else if (running.task.resume()) {
      running.deadline = deadline_after(Clock::now(), timeout_s);
      moved = true;
    } else {
      break;
    }
    if (!running.task.done()) continue;
    ++executed_;
    const auto done = std::move(running_.front());
    running_.pop_front();
    finish(*done->operation, SPARKHVD_OK, {});
  }
  return moved;
}

TimePoint Engine::next_deadline() const {
  TimePoint next = negotiation_ ? negotiation_->next_deadline() : kNever;
  if (!running_.empty()) next = std::min(next, running_.front()->deadline);
  for (const auto& [name, operation] : submitted_) next = std::min(next, operation->give_up_at);
  return next;
}

bool Engine::check_time() {
  if (next_deadline() == kNever) return false;
  const auto now = Clock::now();
  if (now < next_deadline()) return false;
  if (negotiation_) apply(negotiation_->tick(now));
  if (!running_.empty() && now >= running_.front()->deadline) {
    const auto& running = *running_.front();
    const auto* waiting = running.context.schedule.waiting;
    const auto ranks = waiting == nullptr ? std::vector<Rank>{} : waiting->awaited();
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g", running.operation->descriptor.timeout_s);
    fail(SPARKHVD_TIMEOUT, running.operation->label() + ": " + rank_text(rank_) + " waited " +
                               seconds + " s for " +
                               (ranks.empty() ? "the network" : rank_list(ranks)) +
                               ", which took part but stopped in the middle of it. The process may "
                               "be stopped or starved of CPU.");
    return true;
  }
  for (const auto& [name, operation] : submitted_) {
    if (now < operation->give_up_at) continue;
    fail(SPARKHVD_TIMEOUT,
         operation->label() + ": rank 0, which coordinates, has not answered within " +
             std::to_string(operation->descriptor.timeout_s + kCoordinatorGrace_s) +
             " s. Its process may be stopped or starved of CPU.");
    break;
  }
  return true;
}

// ---- Messages
// --------------------------------------------------------------------------------------------

void Engine::handle(Rank from, FrameType type, std::span<const std::byte> body) {
  const auto only_from_coordinator = [&] {
    if (index_of(from) != 0) throw Error(SPARKHVD_PEER_LOST, "a frame that only rank 0 may send");
  };
  switch (type) {
    case FrameType::kReady:
      if (!is_coordinator()) throw Error(SPARKHVD_PEER_LOST, "a frame that only rank 0 receives");
      return apply(negotiation_->ready(from, decode<Ready>(body), Clock::now()));
    case FrameType::kExecute:
      only_from_coordinator();
      return on_execute(decode<Execute>(body));
    case FrameType::kRefuse:
      only_from_coordinator();
      return on_refuse(decode<Refuse>(body));
    case FrameType::kGoodbye:
      return on_goodbye(from, decode<Goodbye>(body));
    case FrameType::kAbort: {
      const auto message = decode<Abort>(body);
      return fail(message.status, message.message);
    }
    case FrameType::kHello:
    case FrameType::kMapped:
    case FrameType::kData:
      break;
  }
  throw Error(SPARKHVD_PEER_LOST, "a frame out of turn");
}

void Engine::apply(Negotiation::Outcome outcome) {
  for (const auto& warning : outcome.warnings) warn(warning);
  for (auto& decision : outcome.decisions) {
    const Bytes frame =
        std::visit([](const auto& message) { return encode(message); }, decision.message);
    bool is_mine = false;
    for (const Rank to : decision.to) {
      if (to == rank_) {
        is_mine = true;
      } else if (communicator_->link(to).is_open()) {
        communicator_->link(to).send(frame);
      }
    }
    if (!is_mine) continue;
    if (const auto* execute = std::get_if<Execute>(&decision.message)) {
      on_execute(*execute);
    } else {
      on_refuse(std::get<Refuse>(decision.message));
    }
  }
}

void Engine::on_execute(const Execute& message) {
  const bool is_cut_off = message.sequence >= departure_limit_;
  const auto entry = submitted_.find(message.name);
  if (entry == submitted_.end()) {
    throw Error(SPARKHVD_PEER_LOST,
                "an order to run '" + message.name + "', which is unknown here");
  }
  if (message.sequence != executes_received_)
    throw Error(SPARKHVD_PEER_LOST, "an order out of order");
  const auto operation = entry->second;
  if (operation->descriptor.collective == Collective::kAllgather) {
    const auto& shape = operation->descriptor.shapes.at(0);
    const auto own = static_cast<std::size_t>(index_of(rank_));
    std::vector<std::int64_t> peer_shape = shape.empty() ? std::vector<std::int64_t>{1} : shape;
    bool ok = message.rows.size() == size_ && message.rows[own] == peer_shape[0];
    for (const auto rows : message.rows) {
      peer_shape[0] = rows;
      ok = ok && count_elements(peer_shape, operation->descriptor.dtype).has_value();
    }
    if (!ok) throw Error(SPARKHVD_PEER_LOST, "impossible sizes for an allgather");
  }
  ++executes_received_;
  submitted_.erase(entry);
  if (is_cut_off) {
    finish(*operation, SPARKHVD_SHUT_DOWN,
           departure_text(operation->descriptor.collective, operation->name, departed_.front()));
  } else {
    running_.push_back(std::make_unique<Running>(*communicator_, kernels_, operation, message));
  }
}

void Engine::on_refuse(const Refuse& message) {
  const auto entry = submitted_.find(message.name);
  if (entry == submitted_.end()) return;  // given up here already
  const auto operation = entry->second;
  submitted_.erase(entry);
  const std::int32_t status =
      message.status > SPARKHVD_PENDING ? message.status : SPARKHVD_INTERNAL;
  finish(*operation, status, message.message);
}

void Engine::on_goodbye(Rank from, const Goodbye& message) {
  said_goodbye_[static_cast<std::size_t>(index_of(from))] = true;
  {
    const std::scoped_lock lock(mutex_);
    departed_.push_back(from);
  }
  departure_limit_ = std::min(departure_limit_, message.executed);
  // Operations that the leaver has finished can be finished here; later ones cannot.
  while (!running_.empty() && running_.back()->context.agreed.sequence >= departure_limit_) {
    // Only an operation that has started lends memory; an earlier one may be in the middle of its
    // transfers.
    if (running_.back()->is_started) {
      for (auto& link : communicator_->links()) link.cancel_lent();
    }
    const auto operation = running_.back()->operation;
    running_.pop_back();
    finish(*operation, SPARKHVD_SHUT_DOWN,
           departure_text(operation->descriptor.collective, operation->name, departed_.front()));
  }
  if (negotiation_) apply(negotiation_->departed(from));
  refuse_after_coordinator();
}

/// The coordinator answers for every operation, also after another rank has left. When it has left
/// itself, everything that it had to say has come before.
void Engine::refuse_after_coordinator() {
  if (!said_goodbye_[0]) return;
  while (!submitted_.empty()) {
    const auto operation = submitted_.begin()->second;
    submitted_.erase(submitted_.begin());
    finish(*operation, SPARKHVD_SHUT_DOWN,
           departure_text(operation->descriptor.collective, operation->name, Rank{0}));
  }
}

void Engine::on_link_end(Link& link) {
  const Rank peer = link.peer();
  if (said_goodbye_[static_cast<std::size_t>(index_of(peer))]) {
    unwatch(link);
    link.close();
    return;
  }
  const std::string why =
      link.state() == Link::State::kEnded
          ? "its connection closed without a goodbye (its process ended or was killed)"
          : link.trouble();
  fail(SPARKHVD_PEER_LOST, rank_text(peer) + " is lost: " + why + ", as seen by " +
                               rank_text(rank_) +
                               ". Start the engine again on the ranks that are left.");
}

// ---- Endings
// ---------------------------------------------------------------------------------------------

void Engine::finish(Operation& operation, std::int32_t status, std::string message) {
  operation.message = std::move(message);
  const std::scoped_lock lock(mutex_);
  names_.erase(operation.name);
  operation.status.store(status, std::memory_order_release);
  if (waiters_ > 0) changed_.notify_all();
}

void Engine::fail_all(std::int32_t status, const std::string& message) {
  // Links first: nothing may be written to a tensor once its operation is finished.
  for (auto& link : communicator_->links()) link.cancel_lent();
  std::vector<std::shared_ptr<Operation>> operations;
  for (auto& running : running_) operations.push_back(running->operation);
  running_.clear();
  for (auto& [name, operation] : submitted_) operations.push_back(operation);
  submitted_.clear();
  {
    const std::scoped_lock lock(mutex_);
    failure_.emplace(status, message);
    for (auto& operation : inbox_) operations.push_back(operation);
    inbox_.clear();
  }
  for (auto& operation : operations)
    finish(*operation, status, operation->label() + ": " + message);
}

void Engine::fail(std::int32_t status, const std::string& message) {
  if (has_failed_) return;
  has_failed_ = true;
  negotiation_.reset();
  fail_all(status, message);
  for (auto& link : communicator_->links()) {
    if (!link.is_open()) continue;
    const bool is_abort = status == SPARKHVD_SHUT_DOWN;
    link.send(encode(Abort{is_abort ? SPARKHVD_PEER_LOST : status, message}));
    part_with(link);
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
