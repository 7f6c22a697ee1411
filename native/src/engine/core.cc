#include "engine/core.h"

#include <algorithm>
#include <cstdio>

#include "collectives/spec.h"
#include "kernels/kernels.h"
#include "text.h"
#include "transport/tcp.h"

namespace sparkhvd {
namespace {

// Consecutive spins that may end in sleep before a rank sleeps at once.
constexpr std::uint32_t kFailedSpins = 100;
constexpr std::uint32_t kFailedSpinsOfNetwork = 3;
// Ranks that share CPUs spin by yielding, which costs less than waking a sleeping rank.
constexpr auto kCrowdedSpin = std::chrono::milliseconds(1);
// Interval at which a rank that sleeps in an operation looks for ended processes. Each wakeup takes 10 us.
constexpr auto kLookPeriod = std::chrono::milliseconds(15);

const Kernels& kernels_or_error(std::int32_t isa) {
  if (!isa_available(isa)) {
    throw Error(SPARKHVD_UNSUPPORTED,
                "instruction set " + std::to_string(isa) +
                    " is not available on this CPU or in this build. Use isa='auto'.");
  }
  return kernels(isa);
}

std::vector<Fd> tuned_sockets(EngineOptions& options) {
  const std::size_t size = options.sockets.size() / (1 + options.world.streams);
  for (std::size_t i = 0; i < options.sockets.size(); ++i) {
    const int fd = options.sockets[i].get();
    // Only the first connection of each pair carries control frames. Its end means that the rank is lost.
    if (fd >= 0) tune_tcp(fd, i < size ? std::optional(options.host_loss_s) : std::nullopt);
  }
  return std::move(options.sockets);
}

/// How a rank's threads wait, according to the CPUs that the ranks of its host may use.
Spinning spinning_of(const World& world, std::int32_t spin_us) {
  Spinning spinning;
  spinning.time = std::chrono::microseconds(spin_us);
  spinning.is_crowded = !have_cpus(world.cpu_shares(), 1);
  if (spinning.is_crowded && spinning.time > Clock::duration::zero())
    spinning.time = std::max<Clock::duration>(spinning.time, kCrowdedSpin);
  spinning.max_failed = world.team().is_one_island() ? kFailedSpins : kFailedSpinsOfNetwork;
  return spinning;
}

}  // namespace

Core::Core(EngineOptions options, const std::function<void()>& notify)
    : Core(std::move(options), notify, std::vector<std::string>()) {}

Core::Core(EngineOptions options, const std::function<void()>& notify,
           std::vector<std::string> warnings)
    : kernels_(kernels_or_error(options.isa)),
      recorder_(options.world.membership.self, options.world.membership.size()),
      stacks_(options.stack_signal, options.stack_pipe),
      world_(std::move(options.world), tuned_sockets(options), wakeup_, warnings),
      spinning_(spinning_of(world_, options.spin_us)),
      in_flight_(world_.membership(), recorder_, *this, notify),
      peers_(world_, poller_, wakeup_, in_flight_, recorder_, *this, stacks_, options.host_loss_s),
      messages_(
          world_,
          [this](Operation& operation, std::int32_t status, std::string text) {
            in_flight_.finish(operation, status, std::move(text));
          },
          [this](Rank rank) { return peers_.ask_for_life(rank); }),
      devices_({world_.rank(), options.stall_warning_s, have_cpus(world_.cpu_shares(), 2)}, groups_,
               in_flight_, peers_, wakeup_, recorder_,
               {[this](const Refuse& refuse) { sets_.on_refuse(world_.rank(), refuse); },
                [this](Group& group) { sets_.settle(group); }, notify}),
      sets_({world_, kernels_, in_flight_, peers_, messages_, devices_, groups_, recorder_},
            options.stall_warning_s) {
  for (const auto& warning : warnings) warn(warning);
  sets_.open_world();
  peers_.start();
}

// ---- A round ---------------------------------------------------------------------------------

/// Runs `body` for the driver. An exception fails the engine, and every operation with it.
template <class Body>
bool Core::protect(Body body) noexcept {
  try {
    try {
      return body();
    } catch (const Error& error) {
      in_flight_.fail(error.status(), error.what());
    } catch (const std::exception& error) {
      in_flight_.fail(SPARKHVD_INTERNAL, rank_text(world_.rank()) +
                                             " failed inside the engine: " + error.what() + ".");
    }
  } catch (...) {
    in_flight_.fail_without_memory();
  }
  return true;
}

bool Core::step(Work work) noexcept {
  return protect([&] { return move(work); });
}

bool Core::move(Work work) {
  // Frames of the other ranks are handled before this rank's own submissions. Otherwise the coordinator could complete
  // an operation without a rank that has submitted it and has joined afterwards.
  bool moved = devices_.hear();
  moved |= !in_flight_.has_failed() && sets_.receive_shared();
  moved |= take_requests();
  if (in_flight_.has_failed()) {
    bool interrupted = false;
    return peers_.poll(0, interrupted) || moved;
  }
  if (work == Work::kAll) {
    // Sends frames first, so that the peers can begin: this rank may now copy tensors for a while.
    if (sets_.tell(true)) peers_.flush(false);
    moved |= move_operations();
    if (in_flight_.has_failed()) return true;
  }
  // During a submission only frames are written. Writing tensors could take long, and the caller may hold Python's
  // lock.
  sets_.tell(work == Work::kAll);
  moved |= peers_.flush(work == Work::kAll);
  moved |= check_time();
  return moved;
}

bool Core::move_operations() {
  bool moved = false;
  if (messages_.is_waiting()) {
    moved |= receive_messages();
    if (in_flight_.has_failed()) return true;
    moved |= messages_.step();
  }
  moved |= sets_.run();
  // On one host frames come through shared memory, so the sockets are polled only in some rounds: each poll costs a
  // system call.
  const bool must_look = peers_.take_look();
  moved |= must_look;
  // With more than one rank, orders for devices always arrive on a connection.
  const bool takes_orders = devices_.is_open() && world_.size() > 1;
  if (must_look || takes_orders || !sets_.is_all_shared() || ++steps_ % 8 == 0) {
    bool interrupted = false;
    moved |= peers_.poll(0, interrupted);
  }
  return moved;
}

bool Core::take_requests() {
  InFlight::Requests requests = in_flight_.take();
  for (auto& operation : requests.operations) {
    if (in_flight_.has_failed()) {
      in_flight_.finish_failed(*operation);
    } else {
      submit(std::move(operation));
    }
  }
  if (requests.abort_reason) {
    in_flight_.fail(SPARKHVD_SHUT_DOWN, *requests.abort_reason);
  }
  return !requests.empty();
}

void Core::submit(std::shared_ptr<Operation> operation) {
  if (!spec_of(operation->descriptor.collective).is_point_to_point) {
    return sets_.submit(std::move(operation));
  }
  const Group* group = groups_.find_open(operation->process_set);
  if (group == nullptr) return sets_.refuse_removed(*operation);
  receive_messages();  // first, so that a withdrawn message cannot match
  if (in_flight_.has_failed()) return in_flight_.finish_failed(*operation);
  messages_.post(std::move(operation), group->team.ranks());
}

bool Core::receive_messages() {
  return messages_.receive(
      [this](Rank from, const std::string& why) { peers_.lose(from, LossKind::kSilent, why); });
}

// ---- Waiting ---------------------------------------------------------------------------------

void Core::look() noexcept {
  peers_.look_soon();  // a connection may have woken this thread
  protect([this] { return peers_.look_for_ended(); });
}

bool Core::sleep(TimePoint deadline, bool& interrupted) noexcept {
  return protect([&] {
    const TimePoint end = std::min(deadline, next_deadline());
    bool moved = false;
    do {
      moved = peers_.poll(milliseconds_until(std::min(end, next_look())), interrupted);
      if (!in_flight_.has_failed()) moved |= peers_.look_for_ended();
    } while (!moved && !interrupted && !in_flight_.has_failed() && Clock::now() < end);
    // Sends now, because the caller's wait may be over and this thread may not drive again.
    if (!in_flight_.has_failed()) {
      sets_.tell(true);
      peers_.flush(true);
    }
    return moved;
  });
}

bool Core::expects_bell() const {
  return sets_.listens() || devices_.is_open() || messages_.is_waiting();
}

TimePoint Core::wake_up() const { return std::min(next_deadline(), next_look()); }

TimePoint Core::next_deadline() const {
  // After a failure only the device's operations are pending. Other deadlines have passed and would keep a thread
  // awake.
  if (in_flight_.has_failed()) return devices_.next_deadline();
  return std::min({devices_.next_deadline(), peers_.next_deadline(), messages_.next_deadline(),
                   sets_.next_deadline()});
}

/// Next time at which a sleeping rank looks for ended processes: soon while an operation is in flight, else never. An
/// idle engine must not use the CPU, and sees the closed connection.
TimePoint Core::next_look() const {
  if (in_flight_.has_failed() || !world_.memory() || in_flight_.is_idle()) return kNever;
  return Clock::now() + kLookPeriod;
}

bool Core::check_time() {
  const auto deadline = next_deadline();
  if (deadline == kNever) return false;
  const auto now = Clock::now();
  if (now < deadline) return false;
  peers_.check_time(now);
  if (!in_flight_.has_failed()) messages_.check_time(now);
  if (!in_flight_.has_failed()) sets_.check_time(now);
  return true;
}

// ---- Frames ----------------------------------------------------------------------------------

void Core::on_frame(Rank from, FrameType type, std::span<const std::byte> body) {
  // The peer's frames in shared memory may be older, so they are handled first.
  sets_.receive_shared();
  if (in_flight_.has_failed()) return;
  switch (type) {
    case FrameType::kReady:
      return sets_.on_ready(from, decode<Ready>(body));
    case FrameType::kExecute:
      return sets_.on_execute(from, decode<Execute>(body));
    case FrameType::kReadyAgain:
      return sets_.on_ready_again(from, decode<ReadyAgain>(body));
    case FrameType::kExecuteAgain:
      return sets_.on_execute_again(from, decode<ExecuteAgain>(body));
    case FrameType::kOrder:
      return devices_.on_order(from, decode<Order>(body).execute);
    case FrameType::kRefuse:
      return sets_.on_refuse(from, decode<Refuse>(body));
    case FrameType::kGoodbye:
      return on_goodbye(from, decode<Goodbye>(body));
    case FrameType::kAbort: {
      const auto message = decode<Abort>(body);
      for (const Loss& loss : message.losses) {
        if (!world_.membership().includes(loss.rank))
          throw nonsense("the loss of a rank that does not exist");
        in_flight_.note(loss);
      }
      return in_flight_.fail(message.status, message.message);
    }
    case FrameType::kStackRequest:
      return peers_.answer_stack(from, decode<StackRequest>(body));
    case FrameType::kStack:
      return peers_.on_stack(from, decode<Stack>(body));
    case FrameType::kSegmentOffer:
      return sets_.on_offer(from, decode<SegmentOffer>(body));
    case FrameType::kSegmentMapped:
      return sets_.on_mapped(from, decode<SegmentMapped>(body));
    case FrameType::kCredit:
      return sets_.on_credit(from, decode<Credit>(body));
    case FrameType::kPoint:
      return messages_.on_frame(from, decode<Point>(body));
    case FrameType::kHello:
    case FrameType::kMapped:
    case FrameType::kData:
      break;
  }
  throw nonsense("an unexpected frame");
}

void Core::on_goodbye(Rank from, const Goodbye& message) {
  peers_.note_goodbye(from);
  in_flight_.depart(from);
  sets_.depart(from, message);
  messages_.depart(from);
  if (from == Rank{0}) devices_.on_relay_end();
}

// ---- Endings ---------------------------------------------------------------------------------

void Core::end_all(std::int32_t status, const std::string& message) {
  // Links first: no link may write to a tensor after its operation is finished.
  for (auto& link : world_.data_links()) link.cancel_lent();
  messages_.clear();
  sets_.let_go();
  in_flight_.finish_all(status, message);
}

void Core::spread(std::int32_t status, const std::string& message) {
  sets_.stop_deciding();
  end_all(status, message);
  devices_.abort();
  const bool is_abort = status == SPARKHVD_SHUT_DOWN;
  peers_.part_with_all(
      encode(Abort{is_abort ? SPARKHVD_PEER_LOST : status, message, in_flight_.losses()}));
}

void Core::let_go() noexcept {
  // Closed connections do not access lent memory.
  world_.close_descriptors();
  messages_.clear();
  sets_.let_go();
  sets_.stop_deciding();
  try {
    devices_.abort();
  } catch (const std::exception&) {
    // The device's operations then end at their deadline.
  }
}

void Core::leave() noexcept {
  try {
    say_goodbye();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sparkhvd warning: rank %d could not send its goodbye: %s\n",
                 index_of(world_.rank()), error.what());
    in_flight_.fail_without_memory();
  }
}

void Core::say_goodbye() {
  if (!in_flight_.has_failed()) sets_.tell(true);
  devices_.hear();  // updates the numbers of ended device operations, which the goodbye reports
  if (!in_flight_.has_failed()) {
    end_all(SPARKHVD_SHUT_DOWN, "the engine of " + rank_text(world_.rank()) +
                                    " was shut down while the operation was in flight.");
    const Bytes goodbye = encode(sets_.goodbye());
    for (auto& link : world_.links()) peers_.send(link.peer(), goodbye);
    // Without pending operations the communicators stay for a moment: other ranks may still need them for operations
    // that have ended here.
    if (devices_.has_some()) devices_.abort();
  }
  peers_.leave();
}

void Core::after_fork() noexcept {
  peers_.after_fork();
  wakeup_.close();
}

}  // namespace sparkhvd
