#include "point_to_point/point_to_point.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "error.h"
#include "point_to_point/operations.h"

namespace sparkhvd {
namespace {

// The receiver sends an acknowledgement after it has taken this number of bytes.
constexpr std::uint64_t kTakenStep = PointToPoint::kEagerInFlight / 4;

std::string kind_text(std::uint64_t bytes, DType dtype) {
  return std::to_string(bytes / element_size(dtype)) + " elements of " +
         std::string(name_of(dtype));
}

Point point_of(PointKind kind, const Operation& operation, std::uint64_t number) {
  Point point;
  point.kind = kind;
  point.process_set = operation.process_set;
  point.tag = tag_of(operation);
  point.dtype = operation.descriptor.dtype;
  point.bytes = operation.pieces.bytes();
  point.number = number;
  return point;
}

}  // namespace

PointToPoint::PointToPoint(World& world, Finish finish, AskForLife ask_for_life)
    : world_(world),
      finish_(std::move(finish)),
      ask_for_life_(std::move(ask_for_life)),
      peers_(world.size()) {
  const std::size_t local_peers = world.team().local_size();
  if (local_peers < 2) return;
  const std::size_t ring = Lane::ring_bytes(world.ranks_of_own_host());
  for (const Rank mate : world.team().island()) {
    if (mate == world.rank()) continue;
    local_peers_.push_back(mate);
    Lane& own = *world.lane(world.rank(), mate);
    Lane& theirs = *world.lane(mate, world.rank());
    peer(mate).writer.emplace(own, theirs, ring);
    peer(mate).reader.emplace(own, theirs, ring);
  }
}

Rank PointToPoint::rank_of(const Peer& peer) const {
  return Rank{static_cast<std::int32_t>(&peer - peers_.data())};
}

/// Records that there is work for a peer, so that `step` visits it.
void PointToPoint::make_busy(Rank rank) {
  if (!std::exchange(peer(rank).is_busy, true)) busy_.push_back(rank);
}

// ---- What the caller asks for ----------------------------------------------------------------

void PointToPoint::post(std::shared_ptr<Operation> operation, std::span<const Rank> members) {
  operation->timeout.start(operation->descriptor.timeout_s);
  if (is_send(*operation)) return send(std::move(operation));
  receive_into(std::move(operation), members);
}

void PointToPoint::watch(const Operation& operation) {
  next_deadline_ = std::min(next_deadline_, operation.timeout.deadline());
}

bool PointToPoint::goes_at_once(const Peer& peer, const Operation& send) const noexcept {
  const std::uint64_t bytes = send.pieces.bytes();
  // The frame's fields also need room in the record.
  const std::size_t most =
      peer.writer ? std::min(kEagerBytes, peer.writer->max_record() - kMessageCost) : kEagerBytes;
  if (bytes > most || peer.eager_sent - peer.eager_taken + bytes + kMessageCost > kEagerInFlight) {
    return false;
  }
  // While an earlier message with this tag is only announced, it may still be withdrawn. Its receive then gets this
  // message, so this message must not already be in a later receive.
  return std::ranges::none_of(peer.announced, [&](const auto& entry) {
    return entry.second->process_set == send.process_set && tag_of(*entry.second) == tag_of(send);
  });
}

void PointToPoint::send(std::shared_ptr<Operation> operation) {
  const Rank to = operation->descriptor.root;
  const std::span<const std::byte> input = input_of(*operation);
  Peer& target = peer(to);
  if (target.has_left) {
    return end(*operation, SPARKHVD_SHUT_DOWN,
               rank_text(to) + " shut down before it received this.");
  }
  if (to == world_.rank()) {
    Message message{
        operation->descriptor.dtype, input.size(), target.next_number++, true, {}, operation};
    to_self_.emplace(message.number, operation);
    watch(*operation);
    return arrive({operation->process_set, to, tag_of(*operation)}, std::move(message));
  }
  const std::uint64_t number = target.next_number++;
  if (goes_at_once(target, *operation)) {
    target.eager_sent += input.size() + kMessageCost;
    Point point = point_of(PointKind::kEager, *operation, number);
    point.payload = input;
    watch(*operation);
    return tell(to, point, std::move(operation));
  }
  tell(to, point_of(PointKind::kAnnounce, *operation, number));
  watch(*operation);
  target.announced.emplace(number, std::move(operation));
  make_busy(to);
}

void PointToPoint::receive_into(std::shared_ptr<Operation> operation,
                                std::span<const Rank> members) {
  const Rank from = operation->descriptor.root;
  Receive receive{std::move(operation), {}, ++receives_};
  if (from == kAnyRank) receive.senders.assign(members.begin(), members.end());
  put_in_line(std::move(receive));
}

/// Adds a new receive, or a receive that has lost its message by a withdrawal, to the waiting receives.
void PointToPoint::put_in_line(Receive receive) {
  const auto operation = receive.operation;
  const Rank from = operation->descriptor.root;
  const Address address{operation->process_set, from, tag_of(*operation)};
  if (auto found = matching_.post(address, receive, receive.place)) {
    return meet(found->address.from, found->message, std::move(receive));
  }
  const bool has_left =
      from == kAnyRank
          ? std::ranges::all_of(receive.senders, [&](Rank rank) { return peer(rank).has_left; })
          : peer(from).has_left;
  if (!has_left) return watch(*operation);
  std::erase_if(matching_.posted(),
                [&](const auto& entry) { return entry.place == receive.place; });
  end(*operation, SPARKHVD_SHUT_DOWN,
      peer_text(*operation) + " shut down, and has sent nothing" + tag_text(*operation) +
          " that was not received.");
}

// ---- Messages --------------------------------------------------------------------------------

void PointToPoint::arrive(const Address& address, Message message) {
  if (closed_.contains(address.process_set)) return drop(address.from, message);
  if (auto found = matching_.arrive(address, std::move(message))) {
    meet(address.from, message, std::move(found->receive));
  }
}

/// Handles a small message. If a receive waits for it, `read` copies the bytes directly into the receive's tensor.
void PointToPoint::arrive_small(const Address& address, Message message,
                                const std::function<void(std::span<std::byte>)>& read) {
  auto found = matching_.take_posted(address);
  if (found && fits(message.dtype, message.bytes, *found->receive.operation)) {
    read(output_of(*found->receive.operation).first(message.bytes));
    consume(address.from, message.bytes);
    return complete(*found->receive.operation, address.from, message.bytes);
  }
  message.payload.resize(message.bytes);
  read(message.payload);
  if (found) return meet(address.from, message, std::move(found->receive));
  arrive(address, std::move(message));
}

bool PointToPoint::fits(DType dtype, std::uint64_t bytes, const Operation& receive) {
  const std::uint64_t room = receive.pieces.bytes();
  return dtype == receive.descriptor.dtype &&
         (bytes == room || (bytes < room && takes_shorter(receive)));
}

/// Handles a match of a message and a receive.
void PointToPoint::meet(Rank from, Message& message, Receive receive) {
  if (!message.is_announced) consume(from, message.bytes);
  Operation& operation = *receive.operation;
  const DType dtype = operation.descriptor.dtype;
  if (!fits(message.dtype, message.bytes, operation)) {
    Point reject;
    reject.kind = PointKind::kReject;
    reject.number = message.number;
    reject.text = rank_text(from) + " sent " + kind_text(message.bytes, message.dtype) +
                  tag_text(operation) + ", " + rank_text(world_.rank()) + " receives " +
                  kind_text(operation.pieces.bytes(), dtype) +
                  (takes_shorter(operation)
                       ? ". Give the receive the same dtype and at least as many elements."
                       : ". Give both the same number of elements and dtype.");
    if (message.own) {
      on_frame(from, reject);
    } else if (message.is_announced) {
      tell(from, reject);
    }
    return end(operation, SPARKHVD_MISMATCH, reject.text);
  }
  if (message.own) {
    to_self_.erase(message.number);
    const auto input = input_of(*message.own);
    if (!input.empty()) std::memmove(output_of(operation).data(), input.data(), input.size());
    finish_(*message.own, SPARKHVD_OK, {});
    return complete(operation, from, message.bytes);
  }
  if (message.is_announced) return accept(from, message, std::move(receive));
  if (message.bytes > 0) {
    std::memcpy(output_of(operation).data(), message.payload.data(), message.payload.size());
  }
  complete(operation, from, message.bytes);
}

void PointToPoint::accept(Rank from, const Message& message, Receive receive) {
  Peer& source = peer(from);
  Operation& operation = *receive.operation;
  Point point;
  point.kind = PointKind::kAccept;
  point.number = message.number;
  tell(from, point);
  operation.timeout.start(operation.descriptor.timeout_s);
  watch(operation);
  const auto target = output_of(operation).first(message.bytes);
  // `mark` in this entry is lent to the connection below. Adding and removing at the ends of a deque moves no entry.
  Incoming& incoming =
      source.incoming.emplace_back(Incoming{std::move(receive), message.number, message.bytes});
  if (source.reader) {
    incoming.left = target;
  } else {
    DataLink& link = data_link(from);
    incoming.body = link.receive_data(kStream, target);
    incoming.end = link.receive_data(kStream, std::span(&incoming.mark, 1));
    if (const auto bytes = link.take_credit(kStream)) {
      world_.link(from).send(encode(Credit{kStream, 0, *bytes}));
    }
  }
  make_busy(from);
}

/// Drops a message of an ended process set. A large message was only announced, and its sender ends it.
void PointToPoint::drop(Rank from, const Message& message) {
  if (!message.is_announced) consume(from, message.bytes);
}

void PointToPoint::consume(Rank from, std::uint64_t bytes) {
  Peer& source = peer(from);
  source.eager_consumed += bytes + kMessageCost;
  if (source.has_left || source.eager_consumed - source.eager_told < kTakenStep) return;
  source.eager_told = source.eager_consumed;
  Point taken;
  taken.kind = PointKind::kTaken;
  taken.number = source.eager_told;
  tell(from, taken);
}

void PointToPoint::on_frame(Rank from, const Point& message) {
  Peer& source = peer(from);
  switch (message.kind) {
    case PointKind::kEager:
      return arrive_small(
          {message.process_set, from, message.tag},
          {message.dtype, message.bytes, message.number, false, {}, {}},
          [&](std::span<std::byte> target) { std::ranges::copy(message.payload, target.begin()); });
    case PointKind::kAnnounce:
      return arrive({message.process_set, from, message.tag},
                    {message.dtype, message.bytes, message.number, true, {}, {}});
    case PointKind::kAccept:
      return on_accept(from, message.number);
    case PointKind::kTaken:
      if (message.number > source.eager_sent)
        throw nonsense("an acknowledgement of bytes that were not sent");
      source.eager_taken = std::max(source.eager_taken, message.number);
      return;
    case PointKind::kReject: {
      source.withdrawn.erase(message.number);
      auto& sends = from == world_.rank() ? to_self_ : source.announced;
      const auto entry = sends.find(message.number);
      if (entry == sends.end()) return;  // the message was withdrawn
      const auto operation = entry->second;
      sends.erase(entry);
      return end(*operation, SPARKHVD_MISMATCH, message.text);
    }
    case PointKind::kWithdraw:
      return on_withdraw(from, message.number);
  }
}

void PointToPoint::on_accept(Rank from, std::uint64_t number) {
  Peer& target = peer(from);
  const auto entry = target.announced.find(number);
  if (entry == target.announced.end()) {
    const auto withdrawn = target.withdrawn.extract(number);
    if (!withdrawn.empty() && !target.writer) fill(from, withdrawn.mapped());
    return;
  }
  Outgoing outgoing{entry->second};
  target.announced.erase(entry);
  Operation& operation = *outgoing.operation;
  if (target.writer) {
    outgoing.left = input_of(operation);
  } else {
    data_link(from).send_data(kStream, input_of(operation));
    outgoing.ticket = data_link(from).send_data(kStream, std::span(&kWhole, 1));
  }
  operation.timeout.start(operation.descriptor.timeout_s);
  watch(operation);
  target.outgoing.push_back(std::move(outgoing));
  make_busy(from);
}

/// Sends filler in place of a withdrawn message. Its receiver had accepted it before the withdrawal arrived, so it
/// expects the bytes in the stream. The withdrawal comes on another connection, so a mark in the stream identifies the
/// filler.
void PointToPoint::fill(Rank to, std::uint64_t bytes) {
  static constexpr std::array<std::byte, 64 << 10> kZeros{};
  for (std::uint64_t done = 0; done < bytes; done += kZeros.size()) {
    const auto part = std::min<std::uint64_t>(kZeros.size(), bytes - done);
    data_link(to).send_data(kStream, std::span(kZeros).first(part));
  }
  data_link(to).send_data(kStream, std::span(&kFiller, 1));
}

/// Handles the withdrawal of a message by its sender.
void PointToPoint::on_withdraw(Rank from, std::uint64_t number) {
  const auto is_meant = [&](const auto& entry) {
    return entry.address.from == from && entry.message.is_announced &&
           entry.message.number == number;
  };
  if (std::erase_if(matching_.arrived(), is_meant) > 0) {
    Point reject;
    reject.kind = PointKind::kReject;
    reject.number = number;
    return tell(from, reject);
  }
  Peer& source = peer(from);
  const auto entry = std::ranges::find(source.incoming, number, &Incoming::number);
  if (entry == source.incoming.end()) return;
  Receive receive = std::exchange(entry->receive, {});
  if (source.reader) {
    source.incoming.erase(entry);
  } else {
    // Only the memory of the receive is released: the filler must still be read from the stream.
    data_link(from).discard(entry->body);
  }
  if (receive.operation) take_next(from, std::move(receive));
}

/// Gives a receive that has lost its withdrawn message the sender's next matching message. If a later receive already
/// has that message, the receives exchange: the later receive then needs the message after it.
void PointToPoint::take_next(Rank from, Receive receive) {
  for (Incoming& next : peer(from).incoming) {
    if (!next.receive.operation) continue;
    const Operation& operation = *receive.operation;
    const Operation& other = *next.receive.operation;
    const Rank root = operation.descriptor.root;
    if (receive.place > next.receive.place || operation.process_set != other.process_set ||
        tag_of(operation) != tag_of(other) || (root != from && root != kAnyRank) ||
        !fits(other.descriptor.dtype, next.bytes, operation)) {
      continue;
    }
    redirect(from, next, operation);
    std::swap(next.receive, receive);
  }
  put_in_line(std::move(receive));
}

/// Redirects an incoming message to another receive, and copies the bytes that have arrived. The tensor of the former
/// receive is free at once.
void PointToPoint::redirect(Rank from, Incoming& incoming, const Operation& receive) {
  DataLink* const link = peer(from).reader ? nullptr : &data_link(from);
  const std::size_t missing = link == nullptr ? incoming.left.size() : link->missing(incoming.body);
  const auto target = output_of(receive).first(incoming.bytes);
  const auto come = output_of(*incoming.receive.operation).first(incoming.bytes - missing);
  std::ranges::copy(come, target.begin());
  if (link == nullptr) {
    incoming.left = target.last(missing);
  } else {
    link->redirect(incoming.body, target.last(missing));
  }
}

}  // namespace sparkhvd
