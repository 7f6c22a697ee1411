// Operations of the plan: ranks and coordinator send them as numbers, many in a frame (see process_sets.h).
#include <algorithm>

#include "engine/process_sets.h"

namespace sparkhvd {
namespace {

// On a connection, numbers wait until this many are collected, or until the driver sends all.
constexpr std::size_t kToldAtOnce = 32;

}  // namespace

bool ProcessSets::tell(bool waits_for_no_more) {
  if (!has_unsent_) return false;
  has_unsent_ = false;
  for (auto& [id, group] : groups_) {
    const std::size_t unsent = group->unsent.numbers.size() + group->unsent_orders.numbers.size();
    if (unsent == 0) continue;
    if (waits_for_no_more || group->has_control_rings() || unsent >= kToldAtOnce) {
      tell(*group);
    } else {
      has_unsent_ = true;
    }
  }
  return true;
}

void ProcessSets::tell(Group& group) {
  if (auto& ready = group.unsent; !ready.numbers.empty()) {
    ready.process_set = group.id;
    const Bytes frame = encode(ready);
    ready.numbers.clear();
    if (!group.has_control_rings() || !group.communicator->tell_coordinator(frame)) {
      peers_.send(group.coordinator(), frame);
    }
  }
  if (auto& orders = group.unsent_orders; !orders.numbers.empty()) {
    orders.process_set = group.id;
    const Bytes frame = encode(orders);
    orders.numbers.clear();
    if (!group.has_control_rings() || !group.communicator->tell_members(frame)) {
      peers_.send_to(group.team.ranks(), frame);
    }
  }
}

/// Submits an operation of the plan by its number.
void ProcessSets::submit_again(Group& group, std::uint32_t number) {
  if (group.is_coordinator()) {
    recorder_.arrived(group.id, group.plan.at(number).name, world_.rank());
    return apply(group, group.negotiation->ready_again(world_.rank(), number, Clock::now()));
  }
  group.unsent.numbers.push_back(number);
  has_unsent_ = true;
}

void ProcessSets::on_ready_again(Rank from, const ReadyAgain& message) {
  if (groups_.is_gone(message.process_set)) return;
  Group& group = coordinated(message.process_set, from);
  const TimePoint now = Clock::now();
  for (const std::uint32_t number : message.numbers) {
    const Plan::Entry& planned = group.plan.at(number);
    if (group.is_closed) {
      refuse_closed(from, group, planned.descriptor.collective, planned.name);
      continue;
    }
    recorder_.arrived(group.id, planned.name, from);
    apply(group, group.negotiation->ready_again(from, number, now));
    if (in_flight_.has_failed()) return;
  }
}

/// Orders an operation of the plan, on the coordinator, when all ranks have submitted it.
void ProcessSets::give_order_again(Group& group, const Again& order) {
  auto& orders = group.unsent_orders;
  if (orders.numbers.empty()) orders.sequence = order.sequence;
  orders.numbers.push_back(order.number);
  has_unsent_ = true;
  run_again(group, order.number, order.sequence);
}

void ProcessSets::on_execute_again(Rank from, const ExecuteAgain& message) {
  Group& group = followed(message.process_set, from);
  std::uint64_t sequence = message.sequence;
  for (const std::uint32_t number : message.numbers) {
    run_again(group, number, sequence++);
    if (in_flight_.has_failed()) return;
  }
}

void ProcessSets::run_again(Group& group, std::uint32_t number, std::uint64_t sequence) {
  const Plan::Entry& planned = group.plan.at(number);
  count_order(group, sequence);
  Execute order = planned.order;
  order.sequence = sequence;
  agree(group, std::move(order));
}

}  // namespace sparkhvd
