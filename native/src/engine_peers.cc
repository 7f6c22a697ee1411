// Ranks that keep others waiting, that leave, or are lost. Called by the driver (see engine.h).
#include <algorithm>
#include <cstdio>

#include "engine.h"
#include "text.h"

namespace sparkhvd {
namespace {

// Ranks whose stacks one warning asks for: what keeps all of them is usually the same.
constexpr std::size_t kMaxStacks = 8;
// What a live peer, or its kernel, needs to tell why it has ended.
constexpr auto kLastWordsTime = std::chrono::seconds(2);

}  // namespace

// ---- Stalls ----------------------------------------------------------------------------------

/// A rank that keeps others waiting tells where it is, as long as its engine is alive.
void Engine::ask_for_stacks(const std::vector<Rank>& ranks) {
  std::size_t asked = 0;
  for (const Rank rank : ranks) {
    if (asked++ == kMaxStacks) return;
    if (rank == rank_) {
      on_stack(rank, {stacks_.take()});
      continue;
    }
    ControlLink& link = world_->link(rank);
    if (!link.is_open() || said_goodbye_[static_cast<std::size_t>(index_of(rank))]) continue;
    auto& requests = stack_requests_[rank];
    if (std::ranges::count(requests, StackUse::kWarning) > 0) {
      warn(rank_text(rank) +
           " has not even answered the request for its stack: its process is stopped, or starved "
           "of CPU, or its host is unreachable.");
      continue;
    }
    requests.push_back(StackUse::kWarning);
    link.send(encode(StackRequest{}));
  }
}

/// A join lasts as long as the others are busy, so its coordinator may be silent for a long time; once
/// in a while it is asked for its stack, which its engine sends by itself. False if it was asked before
/// and has not answered, or need not be.
bool Engine::asks_for_life(const Group& group, Operation& operation, TimePoint now) {
  if (operation.descriptor.collective != Collective::kJoin || operation.has_asked_for_life) {
    return false;
  }
  operation.has_asked_for_life = true;
  operation.give_up_at = deadline_after(now, operation.coordinator_patience_s());
  ControlLink& link = world_->link(group.coordinator());
  if (!link.is_open()) return true;
  stack_requests_[group.coordinator()].push_back(StackUse::kSignOfLife);
  link.send(encode(StackRequest{}));
  return true;
}

/// The rank has answered: joins that asked it go on waiting.
void Engine::note_life(Rank rank) {
  for (auto& [id, group] : groups_) {
    if (group->coordinator() != rank) continue;
    for (auto& [name, operation] : group->submitted) {
      if (!std::exchange(operation->has_asked_for_life, false)) continue;
      operation->give_up_at = deadline_after(Clock::now(), operation->coordinator_patience_s());
    }
  }
}

void Engine::on_stack(Rank from, const Stack& message) {
  if (from != rank_) {
    auto& requests = stack_requests_[from];
    if (requests.empty()) throw nonsense("a stack without request");
    const StackUse use = requests.front();
    requests.pop_front();
    note_life(from);
    if (use == StackUse::kSignOfLife) return;
  }
  warn(rank_text(from) + " is here:\n" + message.text);
}

// ---- Ends of peers ---------------------------------------------------------------------------

void Engine::on_goodbye(Rank from, const Goodbye& message) {
  said_goodbye_[static_cast<std::size_t>(index_of(from))] = true;
  suspects_.erase(from);
  {
    const std::scoped_lock lock(mutex_);
    departed_.push_back(from);
  }
  for (auto& [id, group] : groups_) {
    if (!group->team.includes(from)) continue;
    // A peer that does not mention a process set has removed it, after all that was agreed on there.
    std::uint64_t executed = UINT64_MAX;
    std::uint64_t executed_on_device = UINT64_MAX;
    for (const auto& entry : message.sets) {
      if (entry.process_set != id) continue;
      executed = entry.executed;
      executed_on_device = entry.executed_on_device;
    }
    depart_on_device(*group, from, executed_on_device);
    depart(*group, from, executed);
  }
  messages_->depart(from);
  if (from == Rank{0}) on_relay_end();
}

/// Operations that the departing rank has finished can be finished here; later ones cannot.
void Engine::depart(Group& group, Rank rank, std::uint64_t executed) {
  if (!group.departed) group.departed = rank;
  group.departure_limit = std::min(group.departure_limit, executed);
  while (!group.running.empty() && group.running.back().sequence >= group.departure_limit) {
    Running last = std::move(group.running.back());
    group.running.pop_back();
    // Only an operation that has started lends memory; an earlier one may be in the middle of its
    // transfers.
    if (last.is_started) {
      for (auto& link : world_->data_links()) link.cancel_lent(group.id);
    }
    last.task = {};
    if (!last.operation) continue;
    if (last.operation->descriptor.collective == Collective::kAddProcessSet) {
      abandon_group(*last.operation, rank);
    }
    finish(*last.operation, SPARKHVD_SHUT_DOWN,
           departure_text(last.operation->descriptor.collective, last.operation->name, rank));
  }
  if (group.negotiation) apply(group, group.negotiation->departed(rank));
  refuse_after_coordinator(group);
}

/// A process set whose making ends half-way: other members may have finished it, and must not wait for a
/// coordinator that never works.
void Engine::abandon_group(const Operation& operation, Rank departed) {
  if (operation.rows.empty()) return;  // not begun
  Group* group = find_group(static_cast<std::int32_t>(operation.rows.at(0)));
  if (group == nullptr || group->communicator || !group->is_coordinator()) return;
  announce_end(*group, SPARKHVD_SHUT_DOWN,
               "its process set was never complete, because " + rank_text(departed) +
                   " shut down while it was added.");
}

/// The coordinator answers for every operation, also after another rank has left. When it has left
/// itself, everything that it had to say has come before.
void Engine::refuse_after_coordinator(Group& group) {
  const Rank coordinator = group.coordinator();
  if (!said_goodbye_[static_cast<std::size_t>(index_of(coordinator))]) return;
  std::erase_if(group.submitted, [&](const auto& entry) {
    const auto& operation = *entry.second;
    if (may_be_ordered(group, operation)) return false;
    finish(*entry.second, SPARKHVD_SHUT_DOWN,
           departure_text(operation.descriptor.collective, operation.name, coordinator));
    return true;
  });
}

void Engine::on_link_end(ControlLink& link) {
  const Rank peer = link.peer();
  if (!said_goodbye_[static_cast<std::size_t>(index_of(peer))]) return lose(peer, link.trouble());
  unwatch(link, index_of_link(link));
  link.close();
}

/// The end of a rank is seen, with its last words, on the connection for control frames; if that says
/// nothing, this connection alone has broken.
void Engine::on_data_end(DataLink& link) {
  const Rank peer = link.peer();
  if (!said_goodbye_[static_cast<std::size_t>(index_of(peer))]) {
    suspects_.try_emplace(peer, Suspect{Clock::now() + kLastWordsTime, link.trouble()});
  }
  unwatch(link, index_of_link(link));
  link.close();
}

void Engine::look_for_losses(TimePoint now) {
  if (const auto peer = loss_watch_.look(world_->links(), now)) {
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3g", loss_watch_.limit_s());
    return lose(*peer, std::string("its host has not answered for ") + seconds +
                           " s (host_loss_s): it is down, or the network is cut");
  }
  for (const auto& [peer, suspect] : suspects_) {
    if (now >= suspect.until) return lose(peer, suspect.trouble);
  }
}

void Engine::lose(Rank peer, const std::string& why) {
  fail(SPARKHVD_PEER_LOST, rank_text(peer) + " is lost: " + why + ", as seen by " +
                               rank_text(rank_) +
                               ". Start the engine again on the ranks that are left.");
}

}  // namespace sparkhvd
