// The order of operations on devices, and their launch by the plane. device_ends.cc has their ends.
#include "engine/device_orders.h"

#include <algorithm>
#include <cstring>

#include "collectives/spec.h"
#include "engine/order_checks.h"
#include "nccl/device_collectives.h"
#include "text.h"

namespace sparkhvd {
namespace {

// Largest number of orders that rank 0 holds for process sets that it has not created yet. Users create few process
// sets, so a peer with more is invalid.
constexpr std::size_t kMaxHeldOrders = 4096;

std::string relay_text(Collective collective, const std::string& name) {
  return operation_label(collective, name) +
         ": rank 0 shut down before it, and rank 0 puts the operations on devices of all process "
         "sets in one order. Call shutdown() on rank 0 only after the last operation.";
}

std::string joined_text(const std::string& label, Rank rank, const char* what) {
  return label + ": " + rank_text(rank) + " has joined without an open device, and " + what +
         ". Give join() the device.";
}

const Descriptor& descriptor_of(const Group& group, const Execute& execute) {
  const auto mine = group.submitted.find(execute.name);
  return mine != group.submitted.end() ? mine->second->descriptor : execute.descriptor.value();
}

/// True if a result has bytes, but the caller gave no memory for it.
bool lacks_output(const Operation& operation, const Execute& message, std::size_t members) {
  const Descriptor& descriptor = operation.descriptor;
  if (spec_of(descriptor.collective).result != Result::kAgreed) return false;
  for (std::size_t i = 0; i < descriptor.shapes.size(); ++i) {
    const auto rows = std::span(message.rows).subspan(i * members, members);
    const bool is_empty = std::ranges::all_of(rows, [](auto count) { return count == 0; });
    if (is_empty || operation.on_device->tensors[i].output != nullptr) continue;
    if (row_elements(descriptor.shapes[i], descriptor.dtype) > 0) return true;
  }
  return false;
}

}  // namespace

DeviceOrders::DeviceOrders(const Options& options, Groups& groups, InFlight& in_flight,
                           Peers& peers, WakeupEvent& wakeup, Recorder& recorder, Hooks hooks)
    : options_(options),
      groups_(groups),
      in_flight_(in_flight),
      peers_(peers),
      wakeup_(wakeup),
      recorder_(recorder),
      hooks_(std::move(hooks)) {}

void DeviceOrders::open(const nccl::DeviceOptions& options) {
  const Lock once(opening_);
  if (const auto* open = plane()) {
    if (open->device()->ordinal() == options.ordinal) return;
    throw Error(SPARKHVD_INVALID_ARGUMENT, "device " + std::to_string(options.ordinal) + ": " +
                                               rank_text(options_.rank) + " has opened device " +
                                               std::to_string(open->device()->ordinal()) +
                                               ", and a rank can open only one device.");
  }
  in_flight_.check();
  auto plane = std::make_unique<nccl::DevicePlane>(
      std::make_shared<nccl::Device>(options), [this] { wakeup_.ring_self_if_asleep(); },
      options_.has_cpu_for_plane);
  in_flight_.if_usable([&] { plane_.store(plane.get(), std::memory_order_release); });
  if (is_open()) own_plane_ = std::move(plane);
  // A thread that already sleeps has not announced its sleep to the plane, so the plane could not wake it.
  wakeup_.ring_self();
}

std::shared_ptr<nccl::Device> DeviceOrders::device() const {
  const auto* open = plane();
  return open == nullptr ? nullptr : open->device();
}

// ---- The order -------------------------------------------------------------------------------

void DeviceOrders::order(Group& group, Execute execute) {
  OnDevices& orders = group.device;
  orders.waiting.push_back(std::move(execute));
  const Descriptor& descriptor = descriptor_of(group, orders.waiting.back());
  if (options_.rank != Rank{0} && peers_.has_left(Rank{0})) return refuse_orders(group);
  if (orders.has_id) return send_orders(group);
  if (orders.waiting.size() > 1) return;
  auto* open = plane();
  if (open == nullptr) {
    return in_flight_.fail(
        SPARKHVD_INVALID_ARGUMENT,
        joined_text(operation_label(descriptor.collective, orders.waiting.front().name),
                    options_.rank, "it must create the communicator as the set's first rank"));
  }
  orders.id_deadline = deadline_after(Clock::now(), descriptor.timeout_s);
  open->make_unique_id(group.id);
}

void DeviceOrders::on_unique_id(std::int32_t process_set, const nccl::NcclUniqueId& id) {
  Group* group = groups_.find(process_set);
  if (group == nullptr) return;
  OnDevices& orders = group->device;
  orders.has_id = true;
  orders.id_deadline = kNever;
  if (orders.waiting.empty()) return;  // refused meanwhile
  orders.waiting.front().unique_id.assign(id.bytes.begin(), id.bytes.end());
  send_orders(*group);
}

void DeviceOrders::send_orders(Group& group) {
  OnDevices& orders = group.device;
  while (!orders.waiting.empty() && !in_flight_.has_failed()) {
    Execute execute = std::move(orders.waiting.front());
    orders.waiting.pop_front();
    if (options_.rank == Rank{0}) {
      pass_on(group.team, std::move(execute));
      continue;
    }
    orders.sent.push_back({execute.name, descriptor_of(group, execute).collective});
    peers_.send(Rank{0}, encode(Order{std::move(execute)}));
  }
}

/// Refuses orders that rank 0 has not passed on. Rank 0 has left, so they will not reach any rank.
void DeviceOrders::refuse_orders(Group& group) {
  OnDevices& orders = group.device;
  std::vector<Refuse> refused;
  const auto refuse = [&](const std::string& name, Collective collective) {
    refused.push_back({group.id, name, SPARKHVD_SHUT_DOWN, relay_text(collective, name)});
  };
  for (const auto& sent : orders.sent) refuse(sent.name, sent.collective);
  for (const auto& waiting : orders.waiting) {
    refuse(waiting.name, descriptor_of(group, waiting).collective);
  }
  orders.sent.clear();
  orders.waiting.clear();
  orders.id_deadline = kNever;
  for (const auto& message : refused) {
    peers_.send_to(group.team.ranks(), encode(message));
    hooks_.refuse(message);
  }
}

void DeviceOrders::relay_to(std::int32_t process_set, std::vector<Rank> ranks) {
  if (options_.rank != Rank{0}) return;
  relays_[process_set].ranks = std::move(ranks);
  auto held = std::exchange(held_, {});
  for (auto& [from, execute] : held) on_order(from, std::move(execute));
}

void DeviceOrders::on_order(Rank from, Execute execute) {
  if (options_.rank != Rank{0}) throw nonsense("an order to pass on, which only rank 0 does");
  const auto entry = relays_.find(execute.process_set);
  if (entry == relays_.end()) {
    // The ranks of the set may have created it before this rank begins to create it.
    if (groups_.was_made(execute.process_set) || held_.size() >= kMaxHeldOrders) {
      throw nonsense("an order for a process set that does not exist");
    }
    held_.emplace_back(from, std::move(execute));
    return;
  }
  Relay& relay = entry->second;
  if (from != relay.ranks.front() || from == options_.rank || execute.sequence != relay.next) {
    throw nonsense(
        "an order from a rank that is not the coordinator, or with a wrong sequence number");
  }
  ++relay.next;
  pass_on(Team(options_.rank, {relay.ranks}), std::move(execute));
}

void DeviceOrders::pass_on(const Team& team, Execute execute) {
  if (auto mine = peers_.send_order(std::move(execute), team))
    on_execute(options_.rank, std::move(*mine));
}

// ---- To the device ---------------------------------------------------------------------------

void DeviceOrders::on_execute(Rank from, Execute message) {
  if (from != Rank{0}) throw nonsense("an order for devices that rank 0 has not passed on");
  Group* const found = groups_.find(message.process_set);
  if (found == nullptr || !found->communicator) {
    throw nonsense("an order for devices of a process set that does not exist");
  }
  Group& group = *found;
  if (message.sequence != group.device.received)
    throw nonsense("an order with a wrong sequence number");
  if ((message.sequence == 0) == message.unique_id.empty())
    throw nonsense("an NCCL id that is missing or unexpected");
  ++group.device.received;
  if (!group.device.sent.empty()) group.device.sent.pop_front();
  check_contributors(group.team, message);
  const bool is_possible = message.sequence < group.device.departure_limit;
  if (is_contributor(message, options_.rank)) {
    if (auto operation = take_submitted(group, message)) {
      if (is_possible) {
        hand_over(group, message, std::move(operation));
      } else {
        in_flight_.finish(
            *operation, SPARKHVD_SHUT_DOWN,
            departure_text(operation->descriptor.collective, operation->name, *group.departed));
      }
    }
  } else if (is_possible) {
    hand_over(group, message, nullptr);
  }
  if (!in_flight_.has_failed()) hooks_.settle(group);
}

/// Takes the submitted operation of an order; null if it has ended because a rank has left.
std::shared_ptr<Operation> DeviceOrders::take_submitted(Group& group, const Execute& message) {
  const auto entry = group.submitted.find(message.name);
  if (entry == group.submitted.end() && group.departed) return nullptr;
  if (entry == group.submitted.end() || !entry->second->on_device) {
    throw nonsense("an order to run '" + message.name + "' on a device, which is unknown here");
  }
  const auto operation = entry->second;
  check_order(group.team, *operation, message);
  recorder_.agreed(*operation);
  group.submitted.erase(entry);
  return operation;
}

void DeviceOrders::hand_over(Group& group, const Execute& message,
                             std::shared_ptr<Operation> operation) {
  if (!operation && !message.descriptor) throw nonsense("an order without a description");
  const Descriptor& descriptor = operation ? operation->descriptor : *message.descriptor;
  const std::string label = operation_label(descriptor.collective, message.name);
  const CollectiveSpec& spec = spec_of(descriptor.collective);
  if (*spec.device_algorithm == '\0') throw nonsense("no device runs " + label);
  auto* open = plane();
  if (open == nullptr) {
    return in_flight_.fail(
        SPARKHVD_INVALID_ARGUMENT,
        joined_text(label, options_.rank,
                    "NCCL needs every rank, and a joined rank contributes zeros"));
  }
  nccl::Launch launch;
  if (operation) {
    if (lacks_output(*operation, message, group.team.size())) {
      return in_flight_.fail(
          SPARKHVD_INVALID_ARGUMENT,
          label + ": it has no output on " + rank_text(options_.rank) +
              ". On a device the caller must pass an output with room for all rows.");
    }
    operation->rows = message.rows;
    // An alltoall's order has more numbers than the caller reads.
    operation->rows.resize(
        std::min(message.rows.size(), group.team.size() * descriptor.shapes.size()));
    operation->trace.algorithm = spec.device_algorithm;
    recorder_.started(*operation);
    operation->on_device->is_with_plane = true;
  } else {
    if (!nccl::nccl_type(descriptor.dtype) ||
        !nccl::nccl_op(descriptor.reduce_op, descriptor.dtype)) {
      throw nonsense("a reduction that NCCL does not have");
    }
    launch.passed_over = descriptor;
  }
  launch.process_set = group.id;
  launch.sequence = message.sequence;
  launch.ranks.assign(group.team.ranks().begin(), group.team.ranks().end());
  launch.index = group.team.index();
  launch.rows = message.rows;
  launch.operation = operation;
  if (!message.unique_id.empty()) {
    std::memcpy(launch.unique_id.emplace().bytes.data(), message.unique_id.data(), kUniqueIdBytes);
  }
  on_plane_.push_back(
      {group.id, message.sequence, std::move(operation), label, descriptor.timeout_s});
  if (on_plane_.size() == 1) watch_first();
  open->launch(std::move(launch));
}

}  // namespace sparkhvd
