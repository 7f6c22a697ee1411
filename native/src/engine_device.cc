// Operations on devices: put into one order for all process sets, handed to the plane that launches
// them, finished when the device has. Called by the driver (see engine.h), except for `open_device`.
//
// Two communicators that launch in different orders on two ranks wait for each other for ever. So there
// is one order: a process set's coordinator decides what is next there, and rank 0, whom every
// coordinator tells, passes it on; what a rank gets on rank 0's connection it launches in that order.
#include <algorithm>
#include <cstring>

#include "collectives/spec.h"
#include "engine.h"
#include "nccl/device_collectives.h"
#include "text.h"

namespace sparkhvd {
namespace {

// Process sets are made at the speed of people; more than this is nonsense.
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

/// True if the result has bytes of some rank: then it needs a place.
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

void Engine::open_device(const nccl::DeviceOptions& options) {
  if (is_forked_copy()) throw created_before_fork();
  const std::scoped_lock once(device_mutex_);
  if (const auto* open = plane()) {
    if (open->device()->ordinal() == options.ordinal) return;
    throw Error(SPARKHVD_INVALID_ARGUMENT, "device " + std::to_string(options.ordinal) + ": " +
                                               rank_text(rank_) + " has opened device " +
                                               std::to_string(open->device()->ordinal()) +
                                               " before, and a rank has one.");
  }
  check();
  auto plane = std::make_unique<nccl::DevicePlane>(
      std::make_shared<nccl::Device>(options), [this] { bell_.ring_self_if_asleep(); },
      has_cpu_for_plane_);
  const std::scoped_lock lock(mutex_);
  if (failure_) throw *failure_;
  own_plane_ = std::move(plane);
  plane_.store(own_plane_.get(), std::memory_order_release);
  bell_.ring_self();  // who sleeps has not announced it to the plane
}

std::shared_ptr<nccl::Device> Engine::device() const {
  const auto* open = plane();
  return open == nullptr ? nullptr : open->device();
}

// ---- The order -------------------------------------------------------------------------------

/// The coordinator: all ranks of the set are ready for this.
void Engine::order_on_device(Group& group, Execute execute) {
  DeviceOrders& orders = group.device;
  const auto mine = group.submitted.find(execute.name);
  const Descriptor& descriptor =
      mine != group.submitted.end() ? mine->second->descriptor : execute.descriptor.value();
  orders.waiting.push_back(std::move(execute));
  if (rank_ != Rank{0} && said_goodbye_[0]) return refuse_orders(group);
  if (orders.has_id) return send_device_orders(group);
  if (orders.waiting.size() > 1) return;
  auto* open = plane();
  if (open == nullptr) {
    return fail(SPARKHVD_INVALID_ARGUMENT,
                joined_text(operation_label(descriptor.collective, orders.waiting.front().name),
                            rank_, "it begins the communicator as the set's first rank"));
  }
  orders.id_deadline = deadline_after(Clock::now(), descriptor.timeout_s);
  open->make_unique_id(group.id);
}

void Engine::on_unique_id(std::int32_t process_set, const nccl::NcclUniqueId& id) {
  const auto entry = groups_.find(process_set);
  if (entry == groups_.end()) return;
  DeviceOrders& orders = entry->second->device;
  orders.has_id = true;
  orders.id_deadline = kNever;
  if (orders.waiting.empty()) return;  // refused meanwhile
  orders.waiting.front().unique_id.assign(id.bytes.begin(), id.bytes.end());
  send_device_orders(*entry->second);
}

void Engine::send_device_orders(Group& group) {
  DeviceOrders& orders = group.device;
  while (!orders.waiting.empty() && !has_failed_) {
    Execute execute = std::move(orders.waiting.front());
    orders.waiting.pop_front();
    if (rank_ == Rank{0}) {
      pass_on(group.team, std::move(execute));
      continue;
    }
    const auto mine = group.submitted.find(execute.name);
    const auto collective = mine != group.submitted.end() ? mine->second->descriptor.collective
                                                          : execute.descriptor.value().collective;
    orders.sent.push_back({execute.name, collective});
    world_->link(Rank{0}).send(encode(Order{std::move(execute)}));
  }
}

/// Rank 0 has left, so these will never come to anybody.
void Engine::refuse_orders(Group& group) {
  DeviceOrders& orders = group.device;
  std::vector<Refuse> refused;
  const auto refuse = [&](const std::string& name, Collective collective) {
    refused.push_back({group.id, name, SPARKHVD_SHUT_DOWN, relay_text(collective, name)});
  };
  for (const auto& sent : orders.sent) refuse(sent.name, sent.collective);
  for (const auto& waiting : orders.waiting) {
    const auto mine = group.submitted.find(waiting.name);
    refuse(waiting.name, mine != group.submitted.end() ? mine->second->descriptor.collective
                                                       : waiting.descriptor.value().collective);
  }
  orders.sent.clear();
  orders.waiting.clear();
  orders.id_deadline = kNever;
  for (const auto& message : refused) {
    for (const Rank to : group.team.ranks()) {
      if (to != rank_ && world_->link(to).is_open()) world_->link(to).send(encode(message));
    }
    on_refuse(rank_, message);
  }
}

/// Rank 0: a new process set, of whose first rank it takes orders.
void Engine::relay_to(std::int32_t process_set, std::vector<Rank> ranks) {
  if (rank_ != Rank{0}) return;
  relays_[process_set].ranks = std::move(ranks);
  auto held = std::exchange(held_orders_, {});
  for (auto& [from, execute] : held) on_order(from, std::move(execute));
}

/// Rank 0: the coordinator of a process set has said what is next there.
void Engine::on_order(Rank from, Execute execute) {
  if (rank_ != Rank{0}) throw nonsense("an order to pass on, which only rank 0 does");
  const auto entry = relays_.find(execute.process_set);
  if (entry == relays_.end()) {
    // The set's ranks may have finished making it before this one has begun.
    if (execute.process_set < next_process_set_ || held_orders_.size() >= kMaxHeldOrders) {
      throw nonsense("an order for a process set that does not exist");
    }
    held_orders_.emplace_back(from, std::move(execute));
    return;
  }
  Relay& relay = entry->second;
  if (from != relay.ranks.front() || from == rank_ || execute.sequence != relay.next) {
    throw nonsense("an order that only the coordinator of a process set may send, in order");
  }
  ++relay.next;
  pass_on(Team(rank_, {relay.ranks}), std::move(execute));
}

void Engine::pass_on(const Team& team, Execute execute) {
  if (auto mine = send_order(std::move(execute), team)) on_device_execute(rank_, std::move(*mine));
}

// ---- To the device ---------------------------------------------------------------------------

void Engine::on_device_execute(Rank from, Execute message) {
  if (from != Rank{0}) throw nonsense("an order for devices that rank 0 has not passed on");
  const auto place = groups_.find(message.process_set);
  if (place == groups_.end() || !place->second->communicator) {
    throw nonsense("an order for devices of a process set that is not there");
  }
  Group& group = *place->second;
  if (message.sequence != group.device.received) throw nonsense("an order out of order");
  if ((message.sequence == 0) == message.unique_id.empty()) throw nonsense("an id out of order");
  ++group.device.received;
  if (!group.device.sent.empty()) group.device.sent.pop_front();
  check_contributors(group, message);
  const bool is_contributor =
      message.contributors.empty() || std::ranges::count(message.contributors, rank_) > 0;
  const bool is_possible = message.sequence < group.device.departure_limit;
  if (is_contributor) {
    if (auto operation = take_submitted(group, message)) {
      if (is_possible) {
        hand_over(group, message, std::move(operation));
      } else {
        finish(*operation, SPARKHVD_SHUT_DOWN,
               departure_text(operation->descriptor.collective, operation->name, *group.departed));
      }
    }
  } else if (is_possible) {
    hand_over(group, message, nullptr);
  }
  if (!has_failed_) settle_device(group);
}

/// Null if it has ended here because a rank has left.
std::shared_ptr<Operation> Engine::take_submitted(Group& group, const Execute& message) {
  const auto entry = group.submitted.find(message.name);
  if (entry == group.submitted.end() && group.departed) return nullptr;
  if (entry == group.submitted.end() || !entry->second->on_device) {
    throw nonsense("an order to run '" + message.name + "' on a device, which is unknown here");
  }
  const auto operation = entry->second;
  check_order(group, *operation, message);
  recorder_.agreed(*operation);
  group.submitted.erase(entry);
  return operation;
}

void Engine::hand_over(Group& group, const Execute& message, std::shared_ptr<Operation> operation) {
  if (!operation && !message.descriptor) throw nonsense("an order without a description");
  const Descriptor& descriptor = operation ? operation->descriptor : *message.descriptor;
  const std::string label = operation_label(descriptor.collective, message.name);
  const CollectiveSpec& spec = spec_of(descriptor.collective);
  if (*spec.device_algorithm == '\0') throw nonsense("no device runs " + label);
  auto* open = plane();
  if (open == nullptr) {
    return fail(SPARKHVD_INVALID_ARGUMENT,
                joined_text(label, rank_, "NCCL needs every rank, with zeros of one that joined"));
  }
  nccl::Launch launch;
  if (operation) {
    if (lacks_output(*operation, message, group.team.size())) {
      return fail(SPARKHVD_INVALID_ARGUMENT,
                  label + ": it has no output on " + rank_text(rank_) +
                      ". On a device the caller gives one with room for all rows.");
    }
    operation->rows = message.rows;
    // Of an alltoall more than the caller reads.
    operation->rows.resize(
        std::min(message.rows.size(), group.team.size() * descriptor.shapes.size()));
    operation->trace.algorithm = spec.device_algorithm;
    recorder_.started(*operation);
    operation->on_device->is_with_plane = true;
  } else {
    if (!nccl::nccl_type(descriptor.dtype) ||
        !nccl::nccl_op(descriptor.reduce_op, descriptor.dtype)) {
      throw nonsense("a reduction that NCCL has not got");
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
