// The life of an operation inside the engine: told to the coordinator, agreed on, run, finished; and
// the messages between ranks that this takes. Called by the driver (see engine.h).
#include <algorithm>

#include "collectives/spec.h"
#include "engine.h"
#include "orders.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::int32_t status_of(const Refuse& message) {
  return message.status > SPARKHVD_PENDING ? message.status : SPARKHVD_INTERNAL;
}

}  // namespace

Group* Engine::find_group(std::int32_t process_set) {
  const auto entry = groups_.find(process_set);
  return entry == groups_.end() || entry->second->is_removed ? nullptr : entry->second.get();
}

void Engine::open_group(std::unique_ptr<Group> group) {
  if (group->is_coordinator()) {
    Negotiation::Options options;
    options.process_set = group->id;
    options.members.assign(group->team.ranks().begin(), group->team.ranks().end());
    options.stall_warning_s = stall_warning_s_;
    group->negotiation.emplace(std::move(options));
  }
  const std::int32_t id = group->id;
  groups_.insert_or_assign(id, std::move(group));
}

void Engine::announce(const Team& team, std::int32_t process_set) {
  const auto ranks = team.ranks();
  const std::scoped_lock lock(mutex_);
  members_.insert_or_assign(process_set,
                            std::make_shared<const std::vector<Rank>>(ranks.begin(), ranks.end()));
}

// ---- Submission ------------------------------------------------------------------------------

void Engine::submit_to(Group& group, std::shared_ptr<Operation> operation) {
  if (spec_of(operation->descriptor.collective).is_point_to_point) {
    receive_messages();  // one that has been withdrawn is no match any more
    if (has_failed_) return finish(*operation, failure_->status(), failure_->what());
    return messages_->post(std::move(operation), group.team.ranks());
  }
  const Rank coordinator = group.coordinator();
  if (said_goodbye_[static_cast<std::size_t>(index_of(coordinator))]) {
    finish(*operation, SPARKHVD_SHUT_DOWN,
           departure_text(operation->descriptor.collective, operation->name, coordinator));
    return;
  }
  if (group.is_closed) {
    finish(*operation, group.why_closed, operation->label() + ": " + group.closing_text);
    return;
  }
  const bool is_bounded = operation->descriptor.timeout_s > 0 && !group.is_coordinator();
  operation->give_up_at =
      deadline_after(Clock::now(), is_bounded ? operation->coordinator_patience_s() : 0);
  if (!operation->on_device) place(group, *operation);
  group.submitted.emplace(operation->name, operation);
  Ready ready{operation->process_set, operation->name, operation->descriptor};
  if (group.is_coordinator()) {
    recorder_.arrived(group.id, operation->name, rank_);
    apply(group, group.negotiation->ready(rank_, std::move(ready), Clock::now()));
  } else {
    const Bytes frame = encode(ready);
    // A join tells that nothing follows, so it must not overtake what took the connection. Other
    // operations may overtake each other: the coordinator decides their order anyway.
    const bool may_overtake = operation->descriptor.collective != Collective::kJoin;
    if (may_overtake && group.has_control_rings() && group.communicator->tell_coordinator(frame)) {
      return;
    }
    world_->link(coordinator).send(frame);
  }
}

/// Where the others of this host can read the operation's input without this rank's help: in
/// registered memory, or, if it is small, in a mailbox.
void Engine::place(Group& group, Operation& operation) {
  const auto is_shared = [&](const Segment& segment) {
    return std::ranges::all_of(group.team.island(), [&](Rank rank) { return segment.has(rank); });
  };
  if (operation.descriptor.collective != Collective::kAllreduce || operation.pieces.bytes() == 0 ||
      operation.descriptor.reduce_op == ReduceOp::kAdasum || group.team.local_size() < 2) {
    return;
  }
  if (const auto range = operation.pieces.single_range(); !range.empty()) {
    for (const auto& buffer : buffers_) {
      auto segment = buffer.lock();
      if (!segment) continue;
      const std::byte* begin = segment->data(rank_);
      if (std::less<>()(range.data(), begin) ||
          std::less<>()(begin + segment->bytes(), range.data() + range.size()) ||
          !is_shared(*segment)) {
        continue;
      }
      operation.descriptor.place =
          Place{segment->key(), static_cast<std::uint64_t>(range.data() - begin)};
      operation.segment = std::move(segment);
      return;
    }
  }
  Communicator& communicator = *group.communicator;
  if (!group.team.is_one_island() || operation.pieces.bytes() > communicator.mailbox_bytes())
    return;
  const auto mailbox = communicator.take_mailbox();
  if (!mailbox) return;
  operation.pieces.read(0, {mailbox->data, operation.pieces.bytes()});
  operation.mailbox = mailbox->index;
  operation.descriptor.place = mailbox->place;
}

// ---- Messages --------------------------------------------------------------------------------

/// Receives messages through shared memory. True if there were any.
bool Engine::receive_shared() {
  bool moved = false;
  for (auto& [id, group] : groups_) {
    if (!group->communicator) continue;
    for (auto& reader : group->communicator->control_readers()) {
      try {
        while (!has_failed_ && hear_next(*group, reader)) moved = true;
      } catch (const Error& error) {
        if (error.status() != SPARKHVD_PEER_LOST) throw;
        lose(reader.from(), std::string("it sent ") + error.what());
      }
      if (has_failed_) return true;
    }
  }
  return moved;
}

bool Engine::hear_next(Group& group, ControlReader& reader) {
  const Bytes& frame = reader.next();
  if (frame.empty()) return false;
  const auto header = decode_header(std::span(frame).first(kFrameHeaderBytes));
  const auto body = std::span(frame).subspan(kFrameHeaderBytes);
  const FrameType expected = group.is_coordinator() ? FrameType::kReady : FrameType::kExecute;
  if (header.type != expected || header.body_bytes != body.size()) {
    throw nonsense("a frame out of turn");
  }
  if (group.is_coordinator()) {
    auto ready = decode<Ready>(body);
    if (ready.process_set != group.id) throw nonsense("a frame of another process set");
    reader.pop();
    on_ready(reader.from(), std::move(ready));
    return true;
  }
  auto execute = decode<Execute>(body);
  if (execute.process_set != group.id) throw nonsense("a frame of another process set");
  if (execute.is_on_device) throw nonsense("an order for devices in shared memory");
  // An order before this one was too large, and comes on the connection.
  if (execute.sequence > group.executes_received) return false;
  reader.pop();
  on_execute(reader.from(), std::move(execute));
  return true;
}

/// Receives messages from rank to rank through shared memory. True if there were any.
bool Engine::receive_messages() {
  return messages_->receive([this](Rank from, const std::string& why) { lose(from, why); });
}

/// True if all ordinary messages between the ranks go through shared memory.
bool Engine::is_all_shared() const {
  return std::ranges::all_of(groups_, [](const auto& entry) {
    return entry.second->team.size() == 1 || entry.second->has_control_rings();
  });
}

/// True if a peer may send messages through shared memory.
bool Engine::listens() const {
  return std::ranges::any_of(groups_,
                             [](const auto& entry) { return entry.second->has_control_rings(); });
}

void Engine::handle(ControlLink& link, FrameType type, std::span<const std::byte> body) {
  const Rank from = link.peer();
  // Messages of the peer through shared memory are older.
  receive_shared();
  if (has_failed_) return;
  switch (type) {
    case FrameType::kReady:
      return on_ready(from, decode<Ready>(body));
    case FrameType::kExecute:
      return on_execute(from, decode<Execute>(body));
    case FrameType::kOrder:
      return on_order(from, decode<Order>(body).execute);
    case FrameType::kRefuse:
      return on_refuse(from, decode<Refuse>(body));
    case FrameType::kGoodbye:
      return on_goodbye(from, decode<Goodbye>(body));
    case FrameType::kAbort: {
      const auto message = decode<Abort>(body);
      return fail(message.status, message.message);
    }
    case FrameType::kStackRequest:
      decode<StackRequest>(body);
      return link.send(encode(Stack{stacks_.take()}));
    case FrameType::kStack:
      return on_stack(from, decode<Stack>(body));
    case FrameType::kSegmentOffer:
      return on_offer(from, decode<SegmentOffer>(body));
    case FrameType::kSegmentMapped:
      return on_mapped(from, decode<SegmentMapped>(body));
    case FrameType::kCredit:
      return on_credit(from, decode<Credit>(body));
    case FrameType::kPoint:
      return messages_->on_frame(from, decode<Point>(body));
    case FrameType::kHello:
    case FrameType::kMapped:
    case FrameType::kData:
      break;
  }
  throw nonsense("a frame out of turn");
}

void Engine::on_credit(Rank from, const Credit& message) {
  const bool is_removed = message.process_set != PointToPoint::kStream &&
                          message.process_set < next_process_set_ &&
                          groups_.count(message.process_set) == 0;
  if (is_removed) return;  // its operations ended here before the peer's last receive was posted
  if (message.connection >= world_->options().streams) throw nonsense("credit for no connection");
  world_->data_link(from, message.connection).grant(message.process_set, message.bytes);
}

/// Throws unless a rank may have sent this about new memory by now: a process set makes one piece at a
/// time, and goes on only when all have answered.
void Engine::check_shares(Rank from, const SegmentKey& key, std::size_t outstanding,
                          std::size_t limit) const {
  const auto entry = groups_.find(key.process_set);
  if (entry == groups_.end() || !entry->second->team.includes(from) || outstanding > limit) {
    throw nonsense("memory that nobody asked for");
  }
}

void Engine::on_offer(Rank from, const SegmentOffer& message) {
  world_->arrived(from, message);
  check_shares(from, message.key, world_->num_offers(from, message.key.process_set), 1);
}

void Engine::on_mapped(Rank from, const SegmentMapped& message) {
  world_->arrived(from, message);
  // Who has everybody's answer to one piece may answer for the next while others still collect.
  check_shares(from, message.key, world_->num_mapped(from, message.key.process_set), 2);
}

void Engine::on_ready(Rank from, Ready message) {
  const auto entry = groups_.find(message.process_set);
  if (entry == groups_.end() && message.process_set < next_process_set_) return;  // removed
  if (entry == groups_.end() || !entry->second->is_coordinator() ||
      !entry->second->team.includes(from) ||
      spec_of(message.descriptor.collective).is_point_to_point) {
    throw nonsense("a frame that only the coordinator of a process set receives");
  }
  Group& group = *entry->second;
  if (group.is_closed) {
    // Its submitter may have missed the end, which came before it had the process set.
    const std::string text =
        operation_label(message.descriptor.collective, message.name) + ": " + group.closing_text;
    world_->link(from).send(encode(Refuse{group.id, message.name, group.why_closed, text}));
    return;
  }
  recorder_.arrived(group.id, message.name, from);
  apply(group, group.negotiation->ready(from, std::move(message), Clock::now()));
}

void Engine::apply(Group& group, Negotiation::Outcome outcome) {
  for (const auto& warning : outcome.warnings) warn(warning);
  recorder_.activity().stall_warnings.add(outcome.warnings.size());
  ask_for_stacks(outcome.awaited);
  for (auto& decision : outcome.decisions) {
    if (auto* execute = std::get_if<Execute>(&decision.message);
        execute != nullptr && execute->is_on_device) {
      order_on_device(group, std::move(*execute));
      if (has_failed_) return;
      continue;
    }
    if (auto* execute = std::get_if<Execute>(&decision.message)) {
      give_order(group, std::move(*execute));
    } else if (const auto& refuse = std::get<Refuse>(decision.message);
               send_to(decision.to, encode(refuse))) {
      on_refuse(group.coordinator(), refuse);
    }
  }
}

/// Sends a frame to the other ranks among `to`. True if this one is among them.
bool Engine::send_to(std::span<const Rank> to, const Bytes& frame) {
  for (const Rank rank : to) {
    if (rank != rank_ && world_->link(rank).is_open()) world_->link(rank).send(frame);
  }
  return std::ranges::count(to, rank_) > 0;
}

/// The coordinator: all ranks of the set run this next. Through shared memory all read one message, if
/// it fits; an order's number keeps those that take different ways in order.
void Engine::give_order(Group& group, Execute order) {
  const bool is_short = order.splits.size() * sizeof(std::int64_t) <= ControlRing::kMaxFrame;
  if (is_short && group.has_control_rings() && group.communicator->tell_members(encode(order))) {
    return on_execute(rank_, std::move(order));
  }
  if (auto mine = send_order(std::move(order), group.team)) on_execute(rank_, std::move(*mine));
}

/// Sends every other rank of the team what it needs of the order; returns what this one needs.
std::optional<Execute> Engine::send_order(Execute order, const Team& team) {
  std::optional<Execute> mine;
  for (auto& part : parts_of(std::move(order), team)) {
    if (send_to(part.to, encode(part.order))) mine = std::move(part.order);
  }
  return mine;
}

void Engine::on_execute(Rank from, Execute message) {
  if (message.is_on_device) return on_device_execute(from, std::move(message));
  const auto place = groups_.find(message.process_set);
  if (place == groups_.end() || from != place->second->coordinator()) {
    throw nonsense("a frame that only the coordinator of a process set may send");
  }
  Group& group = *place->second;
  if (!group.communicator) throw nonsense("an order for a process set that is not complete");
  if (message.sequence != group.executes_received) throw nonsense("an order out of order");
  ++group.executes_received;
  check_contributors(group, message);
  const bool is_contributor =
      message.contributors.empty() || std::ranges::count(message.contributors, rank_) > 0;
  if (!is_contributor) return pass_over(group, std::move(message));
  const auto entry = group.submitted.find(message.name);
  if (entry == group.submitted.end()) {
    throw nonsense("an order to run '" + message.name + "', which is unknown here");
  }
  const auto operation = entry->second;
  if (!message.splits.empty()) {
    message.rows = alltoall_rows(message, group.team, rank_);
    message.splits.clear();
  }
  check_order(group, *operation, message);
  recorder_.agreed(*operation);
  group.submitted.erase(entry);
  if (operation->mailbox) group.communicator->address(*operation->mailbox, message.sequence);
  if (message.sequence >= group.departure_limit) {
    return finish(
        *operation, SPARKHVD_SHUT_DOWN,
        departure_text(operation->descriptor.collective, operation->name, *group.departed));
  }
  Team team =
      message.contributors.empty() ? group.team : group.team.restricted(message.contributors);
  resolve_places(group, team, *operation, message);
  Running running;
  running.operation = operation;
  running.sequence = message.sequence;
  running.context.reset(
      new Context{*group.communicator, kernels_, *operation, std::move(message), std::move(team)});
  group.running.push_back(std::move(running));
}

/// An operation that goes on without this rank, because it has joined.
void Engine::pass_over(Group& group, Execute message) {
  if (!message.descriptor) throw nonsense("an order without a description");
  Running running;
  running.sequence = message.sequence;
  running.passed_over = std::make_unique<Execute>(std::move(message));
  group.running.push_back(std::move(running));
}

/// Throws if those who take part in an operation without the ones that have joined cannot be.
void Engine::check_contributors(const Group& group, const Execute& message) const {
  const auto& ranks = message.contributors;
  if (ranks.empty()) return;
  bool ok = std::ranges::adjacent_find(ranks, std::ranges::greater_equal()) == ranks.end() &&
            message.descriptor && spec_of(message.descriptor->collective).goes_on_without_joined;
  for (const Rank rank : ranks) ok = ok && group.team.includes(rank);
  if (!ok) throw nonsense("impossible contributors to '" + message.name + "'");
}

/// Throws if the coordinator's numbers cannot be: they become sizes of memory.
void Engine::check_order(const Group& group, const Operation& operation,
                         const Execute& message) const {
  const CollectiveSpec& spec = spec_of(operation.descriptor.collective);
  const bool ok = (message.contributors.empty() || spec.goes_on_without_joined) &&
                  (spec.are_rows_possible == nullptr ||
                   spec.are_rows_possible({operation.descriptor, message, group.team}));
  if (!ok) throw nonsense("impossible numbers for " + operation.label());
}

/// Places in registered memory as addresses.
void Engine::resolve_places(Group& group, const Team& team, Operation& operation,
                            const Execute& message) {
  if (message.places.empty()) return;
  if (!operation.descriptor.place || message.places.size() != team.local_size()) {
    throw nonsense("impossible places for " + operation.label());
  }
  const Segment* segment =
      operation.mailbox ? group.communicator->segment() : operation.segment.get();
  const std::size_t bytes = operation.pieces.bytes();
  operation.registered.assign(team.size(), nullptr);
  for (std::size_t local = 0; local < team.local_size(); ++local) {
    const Place& place = message.places[local];
    const Rank rank = team.island()[local];
    if (place.segment != segment->key() || place.offset > segment->bytes() ||
        bytes > segment->bytes() - place.offset || !segment->has(rank)) {
      throw nonsense("a place outside of registered memory");
    }
    operation.registered[team.index_in(rank)] = segment->data(rank) + place.offset;
  }
}

void Engine::on_refuse(Rank from, const Refuse& message) {
  const auto place = groups_.find(message.process_set);
  if (place == groups_.end()) return;  // removed
  Group& group = *place->second;
  if (from != group.coordinator()) {
    throw nonsense("a frame that only the coordinator of a process set may send");
  }
  if (message.name.empty()) {
    if (group.id == 0) throw nonsense("the end of the process set of all ranks");
    group.device.expected = message.device_orders;
    return close_group(group, status_of(message), message.message);
  }
  const auto entry = group.submitted.find(message.name);
  if (entry == group.submitted.end()) return;  // given up here already
  const auto operation = entry->second;
  group.submitted.erase(entry);
  if (operation->mailbox) group.communicator->free_mailbox(*operation->mailbox);
  finish(*operation, status_of(message), message.message);
}

}  // namespace sparkhvd
