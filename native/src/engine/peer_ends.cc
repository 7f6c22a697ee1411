// Stragglers, and ranks that leave or are lost (see peers.h).
#include <algorithm>

#include "engine/peers.h"
#include "text.h"

namespace sparkhvd {
namespace {

// A warning requests the stacks of at most this number of ranks, because they usually wait for the same cause.
constexpr std::size_t kMaxStacks = 8;
// After a connection for tensors has closed, its rank (or the rank's kernel) has this time to report the cause.
constexpr auto kLastWordsTime = std::chrono::seconds(2);

}  // namespace

// ---- Stragglers ------------------------------------------------------------------------------

void Peers::ask_for_stacks(const std::vector<Rank>& ranks) {
  std::size_t asked = 0;
  for (const Rank rank : ranks) {
    if (asked++ == kMaxStacks) return;
    if (rank == world_.rank()) {
      on_stack(rank, {stacks_.take()});
      continue;
    }
    if (!world_.link(rank).is_open() || has_left(rank)) continue;
    auto& requests = stack_requests_[rank];
    if (std::ranges::count(requests, StackUse::kWarning) > 0) {
      warn(rank_text(rank) +
           " has not even answered the request for its stack: its process is stopped, or starved "
           "of CPU, or its host is unreachable.");
      continue;
    }
    requests.push_back(StackUse::kWarning);
    send(rank, encode(StackRequest{}));
  }
}

bool Peers::ask_for_life(Rank rank) {
  if (!world_.link(rank).is_open() || has_left(rank)) return false;
  stack_requests_[rank].push_back(StackUse::kSignOfLife);
  send(rank, encode(StackRequest{.for_life = true}));
  return true;
}

void Peers::answer_stack(Rank to, const StackRequest& request) {
  const auto still =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - world_.moved_at());
  send(to, encode(Stack{request.for_life ? "" : stacks_.take(),
                        static_cast<std::uint64_t>(still.count())}));
}

void Peers::on_stack(Rank from, const Stack& message) {
  if (from != world_.rank()) {
    auto& requests = stack_requests_[from];
    if (requests.empty()) throw nonsense("a stack that was not requested");
    const StackUse use = requests.front();
    requests.pop_front();
    // Limits the peer's number to a day, so that the subtraction cannot overflow.
    const std::chrono::milliseconds still(std::min<std::uint64_t>(message.still_ms, 86'400'000));
    events_.on_life(from, Clock::now() - still);
    if (use == StackUse::kSignOfLife) return;
  }
  warn(rank_text(from) + " is here:\n" + message.text);
}

// ---- Ranks that leave or are lost ------------------------------------------------------------

void Peers::note_goodbye(Rank rank) {
  has_left_[static_cast<std::size_t>(index_of(rank))] = true;
  suspects_.erase(rank);
}

LossKind Peers::kind_of(const Link& link) {
  return link.is_ended_by_peer() ? LossKind::kDead : LossKind::kSilent;
}

void Peers::suspect(const DataLink& link) {
  const LossKind kind = kind_of(link);
  // A silent peer is lost at once. A peer that has ended may have sent last frames with the cause, so this rank first
  // waits for them for a short time.
  if (kind == LossKind::kSilent) return lose(link.peer(), kind, link.trouble());
  suspects_.try_emplace(link.peer(), Suspect{Clock::now() + kLastWordsTime, kind, link.trouble()});
}

bool Peers::look_for_ended() {
  bool found = false;
  for (const Rank rank : world_.ended_mates()) {
    ControlLink& link = world_.link(rank);
    while (!in_flight_.has_failed() && link.is_open() && read(link)) found = true;
    if (in_flight_.has_failed()) return true;
    if (!link.is_open() || has_left(rank)) continue;
    lose(rank, LossKind::kDead, link.trouble());
    return true;
  }
  return found;
}

void Peers::check_time(TimePoint now) {
  if (const auto peer = loss_watch_.look(world_.links(), now)) {
    return lose(*peer, LossKind::kSilent,
                "its host has not answered for " + seconds_text(loss_watch_.limit_s()) +
                    " s (host_loss_s): it is down, or the network is cut");
  }
  for (const auto& [peer, suspect] : suspects_) {
    if (now >= suspect.until) return lose(peer, suspect.kind, suspect.trouble);
  }
}

TimePoint Peers::next_deadline() const {
  TimePoint next = loss_watch_.next();
  for (const auto& [rank, suspect] : suspects_) next = std::min(next, suspect.until);
  return next;
}

void Peers::lose(Rank peer, LossKind kind, const std::string& why) {
  in_flight_.note({peer, kind});
  in_flight_.fail(SPARKHVD_PEER_LOST, rank_text(peer) + " is lost: " + why + ", as seen by " +
                                          rank_text(world_.rank()) +
                                          ". Start the engine again on the ranks that are left.");
}

}  // namespace sparkhvd
