// Ends of messages that find no match in time, and of messages with ranks that leave.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "error.h"
#include "point_to_point/operations.h"
#include "point_to_point/point_to_point.h"

namespace sparkhvd {

void PointToPoint::complete(Operation& receive, Rank from, std::uint64_t bytes) {
  receive.rows = {index_of(from), tag_of(receive), static_cast<std::int64_t>(bytes)};
  finish_(receive, SPARKHVD_OK, {});
}

void PointToPoint::end(Operation& operation, std::int32_t status, const std::string& text) {
  finish_(operation, status, operation.label() + ": " + text);
}

void PointToPoint::end_unmatched(std::int32_t status, const Why& why) {
  auto& posted = matching_.posted();
  for (auto entry = posted.begin(); entry != posted.end();) {
    const auto current = entry++;
    const auto operation = current->receive.operation;
    const std::string text = why(*operation, &current->receive);
    if (text.empty()) continue;
    posted.erase(current);
    end(*operation, status, text);
  }
  const auto end_sends = [&](auto& sends, auto tell_receiver) {
    for (auto entry = sends.begin(); entry != sends.end();) {
      const auto [number, operation] = *entry;
      const std::string text = why(*operation, nullptr);
      if (text.empty()) {
        ++entry;
        continue;
      }
      entry = sends.erase(entry);
      tell_receiver(number, *operation);
      end(*operation, status, text);
    }
  };
  for (Peer& target : peers_) {
    end_sends(target.announced, [&](std::uint64_t number, const Operation& operation) {
      if (target.has_left) return;
      target.withdrawn.emplace(number, operation.pieces.bytes());
      Point withdraw;
      withdraw.kind = PointKind::kWithdraw;
      withdraw.number = number;
      tell(rank_of(target), withdraw);
    });
  }
  for (Peer& target : peers_) {
    std::erase_if(target.frames, [&](const Frame& frame) {
      const std::string text = frame.send ? why(*frame.send, nullptr) : "";
      if (text.empty()) return false;
      target.eager_sent -= frame.send->pieces.bytes() + kMessageCost;
      end(*frame.send, status, text);
      return true;
    });
  }
  end_sends(to_self_, [&](std::uint64_t number, const Operation&) {
    std::erase_if(matching_.arrived(), [&](const auto& entry) {
      return entry.message.own && entry.message.number == number;
    });
  });
}

void PointToPoint::check_time(TimePoint now) {
  if (now < next_deadline_) return;
  next_deadline_ = kNever;
  const auto seconds = [](const Operation& operation) {
    return seconds_text(operation.descriptor.timeout_s) + " s";
  };
  end_unmatched(SPARKHVD_TIMEOUT, [&](const Operation& operation, const Receive*) -> std::string {
    if (now < operation.timeout.deadline()) {
      watch(operation);
      return {};
    }
    return (is_send(operation) ? peer_text(operation) + " did not receive a message"
                               : peer_text(operation) + " sent nothing") +
           tag_text(operation) + " within " + seconds(operation) +
           ". Look at what it does, or raise the timeout.";
  });
  // A large message, or messages before it, may take longer than the timeout. So the timeout counts from the time
  // when bytes last moved: on this rank, or on the peer if the bytes wait in the peer's buffer.
  const auto check = [&](Operation& operation, Rank other, TimePoint moved_at) {
    if (now < operation.timeout.deadline() ||
        operation.timeout.extend(moved_at, operation.descriptor.timeout_s, std::span(&other, 1),
                                 ask_for_life_)) {
      return watch(operation);
    }
    throw Error(SPARKHVD_TIMEOUT, operation.label() + ": " + rank_text(world_.rank()) + " waited " +
                                      seconds(operation) + " for " + rank_text(other) +
                                      ", which stopped in the middle of the message. The process "
                                      "may be stopped or starved of CPU.");
  };
  for (const Peer& other : peers_) {
    const Rank rank = rank_of(other);
    for (const auto& outgoing : other.outgoing) {
      check(*outgoing.operation, rank, other.writer ? other.sent_at : data_link(rank).written_at());
    }
    for (const auto& incoming : other.incoming) {
      if (!incoming.receive.operation) continue;
      check(*incoming.receive.operation, rank,
            other.reader ? other.received_at : data_link(rank).read_at());
    }
  }
}

void PointToPoint::note_life(Rank rank, TimePoint moved_at) {
  const auto note = [&](Operation& operation) {
    if (operation.timeout.note_life(rank, moved_at)) watch(operation);
  };
  Peer& other = peer(rank);
  for (const auto& outgoing : other.outgoing) note(*outgoing.operation);
  for (const auto& incoming : other.incoming) {
    if (incoming.receive.operation) note(*incoming.receive.operation);
  }
}

void PointToPoint::depart(Rank rank) {
  Peer& left = peer(rank);
  // First reads the last frames of the rank, because they may still be in shared memory.
  if (left.reader) {
    while (receive_records(rank, left)) {
    }
  } else {
    finish_transfers(rank, left);
  }
  left.has_left = true;
  const std::string gone = rank_text(rank) + " shut down before the message was received.";
  end_unmatched(
      SPARKHVD_SHUT_DOWN, [&](const Operation& operation, const Receive* receive) -> std::string {
        if (operation.descriptor.root == rank) return gone;
        const bool has_sender = receive == nullptr || receive->senders.empty() ||
                                std::ranges::any_of(receive->senders, [&](Rank sender) {
                                  return sender == world_.rank() || !peer(sender).has_left;
                                });
        return has_sender ? "" : "every other rank has shut down.";
      });
  // Messages that were only announced will not arrive any more.
  std::erase_if(matching_.arrived(), [&](const auto& entry) {
    return entry.address.from == rank && entry.message.is_announced;
  });
  left.frames.clear();
  left.withdrawn.clear();
  if (left.reader) return end_transfers(left);
  // Bytes that were sent before the goodbye may still be in flight, unless the connection has already closed.
  if (!data_link(rank).is_open()) on_data_end(rank);
}

void PointToPoint::on_data_end(Rank rank) {
  Peer& left = peer(rank);
  if (!left.has_left) return;
  finish_transfers(rank, left);
  end_transfers(left);
}

void PointToPoint::end_transfers(Peer& left) {
  const std::string gone = rank_text(rank_of(left)) + " shut down in the middle of the message.";
  for (const auto& outgoing : std::exchange(left.outgoing, {})) {
    end(*outgoing.operation, SPARKHVD_SHUT_DOWN, gone);
  }
  for (const auto& incoming : std::exchange(left.incoming, {})) {
    if (incoming.receive.operation) end(*incoming.receive.operation, SPARKHVD_SHUT_DOWN, gone);
  }
}

void PointToPoint::close(std::int32_t process_set, std::int32_t status, const std::string& text) {
  end_unmatched(status, [&](const Operation& operation, const Receive*) {
    return operation.process_set == process_set ? text : std::string();
  });
  closed_.insert(process_set);
  std::erase_if(matching_.arrived(), [&](const auto& entry) {
    if (entry.address.process_set != process_set) return false;
    drop(entry.address.from, entry.message);
    return true;
  });
}

void PointToPoint::clear() noexcept {
  matching_.posted().clear();
  matching_.arrived().clear();
  to_self_.clear();
  for (Peer& other : peers_) {
    other.frames.clear();
    other.announced.clear();
    other.outgoing.clear();
    other.incoming.clear();
    other.is_busy = false;
  }
  busy_.clear();
  next_deadline_ = kNever;
}

}  // namespace sparkhvd
