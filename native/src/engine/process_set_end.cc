// Deadlines of operations, ranks that leave, and the end of process sets (see process_sets.h).
#include <algorithm>

#include "engine/process_sets.h"
#include "text.h"

namespace sparkhvd {
// ---- Time ------------------------------------------------------------------------------------

TimePoint ProcessSets::next_deadline() const {
  TimePoint next = kNever;
  for (const auto& [id, group] : groups_) {
    if (group->negotiation) next = std::min(next, group->negotiation->next_deadline());
    if (!group->running.empty()) next = std::min(next, group->running.front().timeout.deadline());
    next = std::min(next, group->give_up_at);
  }
  return next;
}

void ProcessSets::check_time(TimePoint now) {
  for (auto& [id, group] : groups_) {
    if (in_flight_.has_failed()) return;
    if (group->negotiation) apply(*group, group->negotiation->tick(now));
    if (!check_running(*group, now) || !check_submitted(*group, now)) return;
  }
}

/// Checks the time limit of the first running operation. False if the engine has failed.
bool ProcessSets::check_running(Group& group, TimePoint now) {
  if (group.running.empty() || now < group.running.front().timeout.deadline()) return true;
  auto& running = group.running.front();
  const auto* waiting = running.context ? running.context->schedule.waiting : nullptr;
  std::vector<Rank> ranks;
  if (waiting != nullptr) {
    // Bytes of all ranks of the set count, because the ranks that this rank waits for may wait for other ranks.
    if (running.timeout.extend(waiting->moved_at(), running.operation->descriptor.timeout_s,
                               group.team.ranks(), ask_for_life_)) {
      return true;
    }
    ranks = running.timeout.unanswered();
    if (ranks.empty()) ranks = waiting->awaited();
  }
  for (const Rank rank : ranks) in_flight_.note({rank, LossKind::kSilent});
  in_flight_.fail(SPARKHVD_TIMEOUT,
                  running.operation->label() + ": " + rank_text(world_.rank()) + " waited " +
                      seconds_text(running.operation->descriptor.timeout_s) + " s for " +
                      (ranks.empty() ? "the network" : rank_list(ranks)) +
                      ", which took part but stopped in the middle of it. The process may "
                      "be stopped or starved of CPU.");
  return false;
}

bool ProcessSets::check_submitted(Group& group, TimePoint now) {
  if (now < group.give_up_at) return true;
  for (const auto& [name, operation] : group.submitted) {
    if (now < operation->timeout.deadline() || may_wait_longer(group, *operation)) continue;
    in_flight_.note({group.coordinator(), LossKind::kSilent});
    in_flight_.fail(SPARKHVD_TIMEOUT, operation->label() + ": " + rank_text(group.coordinator()) +
                                          ", which coordinates, has not answered within " +
                                          seconds_text(operation->coordinator_patience_s()) +
                                          " s. Its process may be stopped or starved of CPU.");
    return false;
  }
  group.give_up_at = kNever;
  for (const auto& [name, operation] : group.submitted) {
    group.give_up_at = std::min(group.give_up_at, operation->timeout.deadline());
  }
  return true;
}

/// True if an operation may wait longer for its coordinator. A join lasts as long as the other ranks are busy, so its
/// coordinator may send nothing for a long time. This rank then requests a sign of life from time to time.
bool ProcessSets::may_wait_longer(const Group& group, Operation& operation) {
  if (operation.descriptor.collective != Collective::kJoin) return false;
  const Rank coordinator = group.coordinator();
  const double patience_s = operation.coordinator_patience_s();
  const std::chrono::duration<double> answer_time(patience_s);
  return operation.timeout.extend({}, patience_s, std::span(&coordinator, 1), ask_for_life_,
                                  std::chrono::duration_cast<Clock::duration>(answer_time));
}

void ProcessSets::note_life(Rank rank, TimePoint moved_at) {
  for (auto& [id, group] : groups_) {
    if (!group->running.empty()) group->running.front().timeout.note_life(rank, moved_at);
    if (group->coordinator() != rank) continue;
    for (auto& [name, operation] : group->submitted) {
      // A sign of life is enough here; the time of the last bytes does not matter.
      if (operation->timeout.note_life(rank, Clock::now())) group->give_up_at = Clock::now();
    }
  }
}

// ---- Ends ------------------------------------------------------------------------------------

void ProcessSets::depart(Rank rank, const Goodbye& goodbye) {
  for (auto& [id, group] : groups_) {
    if (!group->team.includes(rank)) continue;
    // If the goodbye does not mention a process set, the peer has removed it and has finished all of its operations.
    std::uint64_t executed = UINT64_MAX;
    std::uint64_t executed_on_device = UINT64_MAX;
    for (const auto& entry : goodbye.sets) {
      if (entry.process_set != id) continue;
      executed = entry.executed;
      executed_on_device = entry.executed_on_device;
    }
    devices_.depart(*group, rank, executed_on_device);
    depart(*group, rank, executed);
  }
}

/// Handles a rank that has left. Operations that it has finished can finish here too; later operations end with an
/// error.
void ProcessSets::depart(Group& group, Rank rank, std::uint64_t executed) {
  if (!group.departed) group.departed = rank;
  group.departure_limit = std::min(group.departure_limit, executed);
  while (!group.running.empty() && group.running.back().sequence >= group.departure_limit) {
    Running last = std::move(group.running.back());
    group.running.pop_back();
    // Only a started operation has lent memory to connections. If this operation has not started, an earlier operation
    // may be in the middle of its transfers, so they must not be cancelled.
    if (last.is_started) {
      for (auto& link : world_.data_links()) link.cancel_lent(group.id);
    }
    last.task = {};
    if (!last.operation) continue;
    if (last.operation->descriptor.collective == Collective::kAddProcessSet) {
      abandon_group(*last.operation, rank);
    }
    in_flight_.finish(
        *last.operation, SPARKHVD_SHUT_DOWN,
        departure_text(last.operation->descriptor.collective, last.operation->name, rank));
  }
  if (group.negotiation) apply(group, group.negotiation->departed(rank));
  refuse_after_coordinator(group);
}

/// Closes a process set after its creation was interrupted on this rank, its coordinator. Other members may have
/// finished the creation, and would wait for the coordinator forever.
void ProcessSets::abandon_group(const Operation& operation, Rank departed) {
  if (operation.rows.empty()) return;  // the creation has not begun
  Group* group = groups_.find_open(static_cast<std::int32_t>(operation.rows.at(0)));
  if (group == nullptr || group->communicator || !group->is_coordinator()) return;
  announce_end(*group, SPARKHVD_SHUT_DOWN,
               "its process set was never complete, because " + rank_text(departed) +
                   " shut down while it was added.");
}

/// Sends the coordinator's last message about a process set.
void ProcessSets::announce_end(Group& group, std::int32_t status, const std::string& text) {
  tell(group);
  const std::uint64_t orders = group.negotiation ? group.negotiation->device_orders() : 0;
  group.device.expected = orders;
  const Bytes frame = encode(Refuse{group.id, "", status, text, orders});
  peers_.send_to(group.team.ranks(), frame);
  close_group(group, status, text);
}

void ProcessSets::close_group(Group& group, std::int32_t status, const std::string& text) {
  group.is_closed = true;
  group.why_closed = status;
  group.closing_text = text;
  end_closed(group);
  group.negotiation.reset();
  messages_.close(group.id, status, text);
}

/// Ends all submissions on a closed set, except device operations with an order that may still arrive.
void ProcessSets::end_closed(Group& group) {
  std::erase_if(group.submitted, [&](const auto& entry) {
    Operation& operation = *entry.second;
    if (devices_.may_be_ordered(group, operation)) return false;
    in_flight_.finish(operation, group.why_closed, operation.label() + ": " + group.closing_text);
    return true;
  });
}

void ProcessSets::settle(Group& group) {
  if (group.is_closed) end_closed(group);
  refuse_after_coordinator(group);
}

/// Refuses the remaining submissions after the coordinator has left. Its goodbye is its last message, so no more orders
/// can arrive, except for devices through rank 0.
void ProcessSets::refuse_after_coordinator(Group& group) {
  const Rank coordinator = group.coordinator();
  if (!peers_.has_left(coordinator)) return;
  std::erase_if(group.submitted, [&](const auto& entry) {
    const auto& operation = *entry.second;
    if (devices_.may_be_ordered(group, operation)) return false;
    in_flight_.finish(*entry.second, SPARKHVD_SHUT_DOWN,
                      departure_text(operation.descriptor.collective, operation.name, coordinator));
    return true;
  });
}

Goodbye ProcessSets::goodbye() const {
  Goodbye goodbye;
  for (const auto& [id, group] : groups_) {
    goodbye.sets.push_back({id, group->executed, group->device.finished});
  }
  return goodbye;
}

void ProcessSets::let_go() noexcept {
  for (auto& [id, group] : groups_) {
    group->running.clear();
    group->submitted.clear();
  }
}

void ProcessSets::stop_deciding() noexcept {
  for (auto& [id, group] : groups_) group->negotiation.reset();
}

}  // namespace sparkhvd
