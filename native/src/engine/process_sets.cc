// Submits operations and handles the frames of their negotiation (see process_sets.h).
#include "engine/process_sets.h"

#include <algorithm>

#include "collectives/spec.h"
#include "engine/order_checks.h"
#include "engine/orders.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::int32_t status_of(const Refuse& message) {
  return message.status > SPARKHVD_PENDING ? message.status : SPARKHVD_INTERNAL;
}

}  // namespace

ProcessSets::ProcessSets(const Parts& parts, double stall_warning_s)
    : world_(parts.world),
      kernels_(parts.kernels),
      in_flight_(parts.in_flight),
      peers_(parts.peers),
      messages_(parts.messages),
      devices_(parts.devices),
      groups_(parts.groups),
      recorder_(parts.recorder),
      stall_warning_s_(stall_warning_s),
      ask_for_life_([this](Rank rank) { return peers_.ask_for_life(rank); }) {}

void ProcessSets::open_world() {
  const Team& team = world_.team();
  Group& group = open(std::make_unique<Group>(0, team));
  group.communicator.emplace(world_, 0, team, world_.memory(), World::kMemoryOffset);
  announce(team, 0);
}

Group& ProcessSets::open(std::unique_ptr<Group> group) {
  if (group->is_coordinator()) {
    Negotiation::Options options;
    options.process_set = group->id;
    options.members.assign(group->team.ranks().begin(), group->team.ranks().end());
    options.stall_warning_s = stall_warning_s_;
    group->negotiation.emplace(std::move(options));
  }
  return groups_.add(std::move(group));
}

void ProcessSets::announce(const Team& team, std::int32_t process_set) {
  const auto ranks = team.ranks();
  in_flight_.announce(process_set, {ranks.begin(), ranks.end()});
}

// ---- Submission ------------------------------------------------------------------------------

void ProcessSets::submit(std::shared_ptr<Operation> operation) {
  Group* const found = groups_.find_open(operation->process_set);
  if (found == nullptr) return refuse_removed(*operation);
  Group& group = *found;
  const Rank coordinator = group.coordinator();
  if (peers_.has_left(coordinator)) {
    in_flight_.finish(
        *operation, SPARKHVD_SHUT_DOWN,
        departure_text(operation->descriptor.collective, operation->name, coordinator));
    return;
  }
  if (group.is_closed) {
    in_flight_.finish(*operation, group.why_closed, operation->label() + ": " + group.closing_text);
    return;
  }
  const bool is_bounded = operation->descriptor.timeout_s > 0 && !group.is_coordinator();
  operation->timeout.start(is_bounded ? operation->coordinator_patience_s() : 0);
  group.give_up_at = std::min(group.give_up_at, operation->timeout.deadline());
  if (!operation->on_device) place(group, *operation);
  if (spec_of(operation->descriptor.collective).rows_of_result != nullptr) {
    operation->descriptor.lacks_memory = !world_.spare_memory().restore();
  }
  group.submitted.emplace(operation->name, operation);
  if (const auto number = group.plan.find(*operation)) return submit_again(group, *number);
  tell(true);  // sends earlier submissions first
  Ready ready{operation->process_set, operation->name, operation->descriptor};
  if (group.is_coordinator()) {
    recorder_.arrived(group.id, operation->name, world_.rank());
    apply(group, group.negotiation->ready(world_.rank(), std::move(ready), Clock::now()));
  } else {
    const Bytes frame = encode(ready);
    // A join is a rank's last submission, so it must not overtake earlier frames on the connection. Other submissions
    // may overtake each other, because the coordinator decides their order anyway.
    const bool may_overtake = operation->descriptor.collective != Collective::kJoin;
    if (may_overtake && group.has_control_rings() && group.communicator->tell_coordinator(frame)) {
      return;
    }
    world_.link(coordinator).send(frame);
  }
}

void ProcessSets::refuse_removed(Operation& operation) {
  in_flight_.finish(operation, SPARKHVD_INVALID_ARGUMENT,
                    operation.label() + ": its process set was removed.");
}

/// Finds or makes a place for the operation's input where the other ranks of the host can read it: in registered
/// memory, or in a mailbox if the input is small.
void ProcessSets::place(Group& group, Operation& operation) {
  if (operation.descriptor.collective != Collective::kAllreduce || operation.pieces.bytes() == 0 ||
      operation.descriptor.reduce_op == ReduceOp::kAdasum || group.team.local_size() < 2) {
    return;
  }
  if (place_in_buffer(group, operation)) return;
  Communicator& communicator = *group.communicator;
  if (!group.team.is_one_island() || operation.pieces.bytes() > communicator.mailbox_bytes())
    return;
  const auto mailbox = communicator.take_mailbox(operation.pieces.bytes());
  if (!mailbox) return;
  operation.pieces.read(0, {mailbox->data, operation.pieces.bytes()});
  operation.mailbox = mailbox->index;
  operation.descriptor.place = mailbox->place;
}

bool ProcessSets::place_in_buffer(Group& group, Operation& operation) {
  const auto is_shared = [&](const Segment& segment) {
    return std::ranges::all_of(group.team.island(), [&](Rank rank) { return segment.has(rank); });
  };
  const auto range = operation.pieces.single_range();
  if (range.empty()) return false;
  for (const auto& buffer : buffers_) {
    auto segment = buffer.lock();
    if (!segment) continue;
    const std::byte* begin = segment->data(world_.rank());
    if (std::less<>()(range.data(), begin) ||
        std::less<>()(begin + segment->bytes(), range.data() + range.size()) ||
        !is_shared(*segment)) {
      continue;
    }
    operation.descriptor.place =
        Place{segment->key(), static_cast<std::uint64_t>(range.data() - begin)};
    operation.segment = std::move(segment);
    return true;
  }
  return false;
}

// ---- Frames ----------------------------------------------------------------------------------

void ProcessSets::on_ready(Rank from, Ready message) {
  if (groups_.is_gone(message.process_set)) return;
  Group& group = coordinated(message.process_set, from);
  if (spec_of(message.descriptor.collective).is_point_to_point) {
    throw nonsense("a submission of a send or receive, which are not negotiated");
  }
  if (group.is_closed) {
    return refuse_closed(from, group, message.descriptor.collective, message.name);
  }
  recorder_.arrived(group.id, message.name, from);
  apply(group, group.negotiation->ready(from, std::move(message), Clock::now()));
}

void ProcessSets::apply(Group& group, Negotiation::Outcome outcome) {
  for (const auto& warning : outcome.warnings) warn(warning);
  recorder_.activity().stall_warnings.add(outcome.warnings.size());
  peers_.ask_for_stacks(outcome.awaited);
  for (auto& decision : outcome.decisions) {
    if (auto* execute = std::get_if<Execute>(&decision.message);
        execute != nullptr && execute->is_on_device) {
      devices_.order(group, std::move(*execute));
      if (in_flight_.has_failed()) return;
      continue;
    }
    if (auto* execute = std::get_if<Execute>(&decision.message)) {
      give_order(group, std::move(*execute));
    } else if (const auto* again = std::get_if<Again>(&decision.message)) {
      give_order_again(group, *again);
    } else {
      auto& refuse = std::get<Refuse>(decision.message);
      // The refusal includes the lost ranks, because the goodbye of the lost rank may arrive later.
      if (refuse.status == SPARKHVD_SHUT_DOWN) refuse.losses = in_flight_.losses();
      if (peers_.send_to(decision.to, encode(refuse))) on_refuse(group.coordinator(), refuse);
    }
  }
}

/// Sends an order to all ranks of the set. If it fits into shared memory, all ranks read the same message there. The
/// sequence number keeps orders from shared memory and connections in sequence.
void ProcessSets::give_order(Group& group, Execute order) {
  tell(group);  // sends earlier orders first
  const bool is_short = order.splits.size() * sizeof(std::int64_t) <= ControlRing::kMaxFrame;
  if (is_short && group.has_control_rings() && group.communicator->tell_members(encode(order))) {
    return on_execute(world_.rank(), std::move(order));
  }
  if (auto mine = peers_.send_order(std::move(order), group.team))
    on_execute(world_.rank(), std::move(*mine));
}

void ProcessSets::on_execute(Rank from, Execute message) {
  if (message.is_on_device) return devices_.on_execute(from, std::move(message));
  Group& group = followed(message.process_set, from);
  count_order(group, message.sequence);
  check_contributors(group.team, message);
  if (!is_contributor(message, world_.rank())) return pass_over(group, std::move(message));
  agree(group, std::move(message));
}

void ProcessSets::count_order(Group& group, std::uint64_t sequence) {
  if (sequence != group.executes_received) throw nonsense("an order with a wrong sequence number");
  ++group.executes_received;
}

/// Handles an order for an operation that this rank has submitted.
void ProcessSets::agree(Group& group, Execute message) {
  const auto entry = group.submitted.find(message.name);
  if (entry == group.submitted.end()) {
    throw nonsense("an order to run '" + message.name + "', which is unknown here");
  }
  const auto operation = entry->second;
  if (!message.splits.empty()) {
    message.rows = alltoall_rows(message, group.team, world_.rank());
    message.splits.clear();
  }
  check_order(group.team, *operation, message);
  if (message.number) group.plan.remember(*operation, message);
  recorder_.agreed(*operation);
  group.submitted.erase(entry);
  if (operation->mailbox) group.communicator->address(*operation->mailbox, message.sequence);
  if (message.sequence >= group.departure_limit) {
    return in_flight_.finish(
        *operation, SPARKHVD_SHUT_DOWN,
        departure_text(operation->descriptor.collective, operation->name, *group.departed));
  }
  start_later(group, operation, std::move(message));
}

/// Queues a negotiated operation. It runs when it is the first operation of its process set.
void ProcessSets::start_later(Group& group, const std::shared_ptr<Operation>& operation,
                              Execute message) {
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

/// Queues an order that other ranks run without this rank, because this rank has joined.
void ProcessSets::pass_over(Group& group, Execute message) {
  if (!message.descriptor) throw nonsense("an order without a description");
  Running running;
  running.sequence = message.sequence;
  running.passed_over = std::make_unique<Execute>(std::move(message));
  group.running.push_back(std::move(running));
}

/// Converts the places of an order into addresses.
void ProcessSets::resolve_places(Group& group, const Team& team, Operation& operation,
                                 const Execute& message) {
  if (message.places.empty()) return;
  if (!operation.descriptor.place || message.places.size() != team.local_size()) {
    throw nonsense("invalid places for " + operation.label());
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

void ProcessSets::on_refuse(Rank from, const Refuse& message) {
  Group* const found = groups_.find(message.process_set);
  if (found == nullptr) return;  // the set was removed
  Group& group = *found;
  if (from != group.coordinator()) {
    throw nonsense("a frame that only the coordinator of a process set may send");
  }
  for (const Loss& loss : message.losses) {
    if (!world_.membership().includes(loss.rank))
      throw nonsense("the loss of a rank that does not exist");
    in_flight_.note(loss);
  }
  if (message.name.empty()) {
    if (group.id == 0) throw nonsense("the end of the process set of all ranks");
    group.device.expected = message.device_orders;
    return close_group(group, status_of(message), message.message);
  }
  const auto entry = group.submitted.find(message.name);
  if (entry == group.submitted.end()) return;  // the operation has already timed out here
  const auto operation = entry->second;
  group.submitted.erase(entry);
  if (operation->mailbox) group.communicator->free_mailbox(*operation->mailbox);
  in_flight_.finish(*operation, status_of(message), message.message);
}

}  // namespace sparkhvd
