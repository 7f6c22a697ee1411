// Frames about process sets: their routes, and the ranks that may send them (see process_sets.h).
#include <algorithm>
#include <type_traits>

#include "engine/process_sets.h"
#include "text.h"

namespace sparkhvd {

/// The process set of a frame from a member to its coordinator. Throws unless this rank coordinates it and `from` is in
/// it.
Group& ProcessSets::coordinated(std::int32_t process_set, Rank from) {
  Group* const found = groups_.find(process_set);
  if (found == nullptr || !found->is_coordinator() || !found->team.includes(from)) {
    throw nonsense("a frame that only the coordinator of a process set receives");
  }
  return *found;
}

/// Refuses a submission on a closed set. Its sender may not know the end of the set, if the message about the end
/// arrived before the sender had created the set.
void ProcessSets::refuse_closed(Rank to, const Group& group, Collective collective,
                                const std::string& name) {
  const std::string text = operation_label(collective, name) + ": " + group.closing_text;
  peers_.send(to, encode(Refuse{group.id, name, group.why_closed, text}));
}

/// The process set of a frame from its coordinator. Throws unless `from` coordinates it and its creation is complete.
Group& ProcessSets::followed(std::int32_t process_set, Rank from) {
  Group* const found = groups_.find(process_set);
  if (found == nullptr || from != found->coordinator()) {
    throw nonsense("a frame that only the coordinator of a process set may send");
  }
  if (!found->communicator) throw nonsense("an order for a process set that is not complete");
  return *found;
}

bool ProcessSets::receive_shared() {
  bool moved = false;
  for (auto& [id, group] : groups_) {
    if (!group->communicator) continue;
    for (auto& reader : group->communicator->control_readers()) {
      try {
        while (!in_flight_.has_failed() && hear_next(*group, reader)) moved = true;
      } catch (const Error& error) {
        if (error.status() != SPARKHVD_PEER_LOST) throw;
        peers_.lose(reader.from(), LossKind::kSilent, std::string("it sent ") + error.what());
      }
      if (in_flight_.has_failed()) return true;
    }
  }
  return moved;
}

bool ProcessSets::hear_next(Group& group, ControlReader& reader) {
  const Bytes& frame = reader.next();
  if (frame.empty()) return false;
  const auto header = decode_header(std::span(frame).first(kFrameHeaderBytes));
  const auto body = std::span(frame).subspan(kFrameHeaderBytes);
  const auto take = [&]<class Message>(std::type_identity<Message>, auto handle) {
    auto message = decode<Message>(body);
    if (message.process_set != group.id) throw nonsense("a frame of another process set");
    if constexpr (requires { message.is_on_device; }) {
      if (message.is_on_device) throw nonsense("an order for devices in shared memory");
    }
    if constexpr (requires { message.sequence; }) {
      // An earlier order was too large for shared memory and has not arrived on the connection yet.
      if (message.sequence > group.executes_received) return false;
    }
    reader.pop();
    (this->*handle)(reader.from(), std::move(message));
    return true;
  };
  const bool is_whole = header.body_bytes == body.size();
  if (is_whole && group.is_coordinator()) {
    if (header.type == FrameType::kReady) {
      return take(std::type_identity<Ready>(), &ProcessSets::on_ready);
    }
    if (header.type == FrameType::kReadyAgain) {
      return take(std::type_identity<ReadyAgain>(), &ProcessSets::on_ready_again);
    }
  } else if (is_whole) {
    if (header.type == FrameType::kExecute) {
      return take(std::type_identity<Execute>(), &ProcessSets::on_execute);
    }
    if (header.type == FrameType::kExecuteAgain) {
      return take(std::type_identity<ExecuteAgain>(), &ProcessSets::on_execute_again);
    }
  }
  throw nonsense("an unexpected frame");
}

bool ProcessSets::is_all_shared() const {
  return std::ranges::all_of(groups_, [](const auto& entry) {
    return entry.second->team.size() == 1 || entry.second->has_control_rings();
  });
}

bool ProcessSets::listens() const {
  return std::ranges::any_of(groups_,
                             [](const auto& entry) { return entry.second->has_control_rings(); });
}

void ProcessSets::on_credit(Rank from, const Credit& message) {
  const bool is_gone =
      message.process_set != PointToPoint::kStream && groups_.is_gone(message.process_set);
  if (is_gone) return;  // the set was removed here before the peer granted its last credit
  if (message.connection >= world_.options().streams)
    throw nonsense("credit for a connection that does not exist");
  world_.data_link(from, message.connection).grant(message.process_set, message.bytes);
}

/// Throws if a rank has sent more frames about new memory than it may. A process set shares one piece at a time, and
/// continues when all ranks have answered.
void ProcessSets::check_shares(Rank from, const SegmentKey& key, std::size_t outstanding,
                               std::size_t limit) const {
  const Group* group = groups_.find(key.process_set);
  if (group == nullptr || !group->team.includes(from) || outstanding > limit) {
    throw nonsense("memory that was not requested");
  }
}

void ProcessSets::on_offer(Rank from, const SegmentOffer& message) {
  world_.arrived(from, message);
  check_shares(from, message.key, world_.num_offers(from, message.key.process_set), 1);
}

void ProcessSets::on_mapped(Rank from, const SegmentMapped& message) {
  world_.arrived(from, message);
  // Two answers are possible: a rank with all answers to a piece may already answer for the next piece, while this rank
  // still collects answers to the first.
  check_shares(from, message.key, world_.num_mapped(from, message.key.process_set), 2);
}

}  // namespace sparkhvd
