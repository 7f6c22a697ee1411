// Starts and runs negotiated operations in their order, and applies their effects (see process_sets.h).
#include <algorithm>

#include "collectives/spec.h"
#include "engine/order_checks.h"
#include "engine/orders.h"
#include "engine/process_sets.h"
#include "text.h"

namespace sparkhvd {
namespace {

constexpr const char* kRemoved = "its process set was removed before every rank had submitted it.";

/// Holds when the last message of a removed set's coordinator has arrived.
class Closed final : public Condition {
 public:
  explicit Closed(const Group& group) : group_(&group) {}
  bool ready() const override { return group_->is_closed; }
  std::vector<Rank> awaited() const override { return {group_->coordinator()}; }

 private:
  const Group* group_;
};

/// Waits for the last message of a removed set's coordinator, because its orders must arrive before the set is deleted.
Task wait_until_closed(Context& context, const Group& group) {
  context.algorithm = "remove_process_set";
  co_await Closed(group);
}

std::vector<Rank> ranks_of(const Operation& operation) {
  std::vector<Rank> ranks;
  for (const auto number : operation.descriptor.numbers) {
    ranks.push_back(Rank{static_cast<std::int32_t>(number)});
  }
  return ranks;
}

}  // namespace

bool ProcessSets::run() {
  bool moved = false;
  // Each process set advances as far as it can. A set that waits does not stop the other sets.
  for (auto entry = groups_.begin(); entry != groups_.end() && !in_flight_.has_failed();) {
    Group& group = *entry->second;
    while (!group.running.empty() && !in_flight_.has_failed() && run_first(group)) moved = true;
    if (group.is_removed && group.running.empty() && devices_.is_done(group)) {
      devices_.remove(group);
      for (auto& link : world_.data_links()) link.forget(group.id);
      entry = groups_.erase(entry);
    } else {
      ++entry;
    }
  }
  return moved;
}

bool ProcessSets::is_running() const {
  return std::ranges::any_of(groups_,
                             [](const auto& entry) { return !entry.second->running.empty(); });
}

/// Advances the first negotiated operation of a process set. False if the operation has to wait.
bool ProcessSets::run_first(Group& group) {
  Running& running = group.running.front();
  if (!running.operation) {
    // Counts the chunks now, not when the order came, because earlier operations may change the settings.
    Communicator& communicator = *group.communicator;
    const Execute& order = *running.passed_over;
    communicator.advance_chunks(chunks_of(communicator, group.team.restricted(order.contributors),
                                          *order.descriptor, order));
    if (communicator.has_memory()) publish_all(communicator);
  } else {
    if (!running.is_started) {
      if (running.operation->descriptor.collective == Collective::kRemoveProcessSet &&
          !std::exchange(running.has_looked, true)) {
        // First reads the connections once, because earlier submissions on the set may still be on them.
        peers_.look_soon();
        return false;
      }
      running.is_started = true;
      begin(group, running);
      if (!running.task.done()) go_on(running);
    } else if (!go_on(running)) {
      return false;
    }
    running.timeout.start(running.operation->descriptor.timeout_s);
    if (!running.task.done()) return true;
  }
  Running done = std::move(running);
  group.running.pop_front();
  ++group.executed;
  if (group.communicator->has_memory()) {
    group.communicator->publish(Stage::kPassed, group.executed);
  }
  if (done.operation) conclude(group, done);
  return true;
}

/// Resumes an operation's task. False if the task has to wait.
bool ProcessSets::go_on(Running& running) {
  try {
    return running.task.resume();
  } catch (const OperationFailed& failure) {
    running.failure = failure;
    running.task = {};
    return true;
  }
}

void ProcessSets::begin(Group& group, Running& running) {
  const Descriptor& descriptor = running.operation->descriptor;
  recorder_.started(*running.operation);
  switch (descriptor.collective) {
    case Collective::kBarrier:
    case Collective::kJoin:
      return;
    case Collective::kAddProcessSet:
      return add_group(group, running);
    case Collective::kRemoveProcessSet:
      return remove_group(running);
    case Collective::kConfigure:
      return configure(group, *running.operation);
    default:
      break;
  }
  const auto run = spec_of(descriptor.collective).run;
  if (run == nullptr) {
    throw Error(SPARKHVD_INTERNAL, "a collective without an implementation was agreed on.");
  }
  running.operation->trace.algorithm = name_of(descriptor.collective).data();
  running.task = run(*running.context);
}

/// Applies the effects of an operation after its run.
void ProcessSets::conclude(Group& group, Running& running) {
  Operation& operation = *running.operation;
  Context& context = *running.context;
  if (running.failure) {
    operation.output.reset();
    return in_flight_.finish(operation, running.failure->status(), running.failure->what());
  }
  switch (operation.descriptor.collective) {
    case Collective::kJoin:
      operation.rows = context.agreed.rows;
      break;
    case Collective::kRegister:
      keep_buffer(operation, std::move(context.segment));
      break;
    case Collective::kAddProcessSet:
      complete_group(group, operation, context);
      break;
    case Collective::kRemoveProcessSet:
      if (operation.rows.empty()) {
        return in_flight_.finish(operation, SPARKHVD_INVALID_ARGUMENT,
                                 operation.label() + ": process set " +
                                     std::to_string(operation.descriptor.numbers.at(0)) +
                                     " was never added. Give the id that adding it returned.");
      }
      if (Group* removed = groups_.find_open(static_cast<std::int32_t>(operation.rows.at(0)))) {
        removed->is_removed = true;  // its negotiated operations still run
      }
      break;
    default:
      break;
  }
  for (const auto& warning : context.warnings) warn(warning);
  if (context.team.local_size() > 1) {
    recorder_.activity().shared_bytes.add(operation.pieces.bytes());
  }
  in_flight_.finish(operation, SPARKHVD_OK, {});
}

void ProcessSets::keep_buffer(Operation& operation, std::shared_ptr<Segment> segment) {
  operation.segment = std::move(segment);
  if (!operation.segment || !operation.segment->has(world_.rank())) {
    operation.segment = nullptr;  // sparkhvd_work_buffer then reports the error
    return;
  }
  // All ranks of the host have the same piece, so an in-place reduction cannot use it.
  if (operation.segment->is_one_piece()) return;
  std::erase_if(buffers_, [](const auto& buffer) { return buffer.expired(); });
  buffers_.push_back(operation.segment);
}

void ProcessSets::complete_group(Group& group, const Operation& operation, Context& context) {
  const auto id = static_cast<std::int32_t>(operation.rows.at(0));
  if (Group* added = groups_.find_open(id)) {
    added->team = context.team;
    auto memory = context.team.local_size() > 1 ? std::move(context.segment) : nullptr;
    added->communicator.emplace(world_, id, context.team, std::move(memory), 0);
    added->communicator->knobs() = group.communicator->knobs();
  }
  announce(group.team.restricted(ranks_of(operation)), id);
}

/// Creates the process set. From here on its coordinator accepts submissions; operations run after the ranks have
/// shared their memory.
void ProcessSets::add_group(Group& group, Running& running) {
  const std::int32_t id = groups_.take_number();
  running.operation->rows = {id};
  Team team = group.team.restricted(ranks_of(*running.operation));
  devices_.relay_to(id, ranks_of(*running.operation));
  if (!team.includes(world_.rank())) return;
  open(std::make_unique<Group>(id, team));
  running.context->team = std::move(team);
  running.task = share_memory(*running.context, Communicator::memory_bytes(world_.options()),
                              Segment::Kind::kWorkspace);
}

/// Begins the removal of a process set. The ranks could disagree on the remaining operations, so the coordinator
/// decides: after its last order it sends a final message, and each member keeps the set until it has received this
/// message.
void ProcessSets::remove_group(Running& running) {
  const auto id = static_cast<std::int32_t>(running.operation->descriptor.numbers.at(0));
  if (!groups_.was_made(id)) return;  // conclude() reports the error
  running.operation->rows = {id};
  in_flight_.withdraw(id);
  Group* group = groups_.find_open(id);
  if (group == nullptr) return;
  if (!group->is_coordinator()) {
    running.task = wait_until_closed(*running.context, *group);
    return;
  }
  announce_end(*group, SPARKHVD_INVALID_ARGUMENT, kRemoved);
}

void ProcessSets::configure(Group& group, const Operation& operation) {
  const auto& numbers = operation.descriptor.numbers;
  Knobs& knobs = group.communicator->knobs();
  const auto set = [&](std::size_t knob, std::uint64_t& value) {
    if (numbers.at(knob) > 0) value = static_cast<std::uint64_t>(numbers[knob]);
  };
  set(SPARKHVD_KNOB_CHUNK_BYTES, knobs.chunk_bytes);
  set(SPARKHVD_KNOB_STREAMS, knobs.streams);
  set(SPARKHVD_KNOB_DIRECT_RANKS, knobs.direct_ranks);
  group.communicator->restart_streams();
}

}  // namespace sparkhvd
