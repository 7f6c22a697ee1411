// Moves the bytes of messages: through lanes inside a host, and on connections between hosts.
#include <algorithm>
#include <utility>

#include "point_to_point/operations.h"
#include "point_to_point/point_to_point.h"

namespace sparkhvd {
namespace {

constexpr std::uint32_t kFrameRecord = 0;
constexpr std::uint32_t kChunkRecord = 1;
constexpr std::uint32_t kSmallRecord = 2;  // a SmallHead and the bytes of the message
// Largest number of records that are read from a lane before the other lanes are read.
constexpr int kRecordsAtOnce = 64;

/// Header of a small message in a lane; the bytes of the message follow.
struct SmallHead {
  std::int32_t process_set = 0;
  std::int32_t dtype = 0;
  std::int64_t tag = 0;
  std::uint64_t number = 0;
};

Bytes small_head(const Point& message) {
  const SmallHead head{message.process_set, static_cast<std::int32_t>(message.dtype), message.tag,
                       message.number};
  const auto bytes = std::as_bytes(std::span(&head, 1));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

/// Sends a frame to a rank. `send`: the operation of a small message, if the frame is a small message. The operation is
/// finished when its bytes have left the caller's memory.
void PointToPoint::tell(Rank to, const Point& message, std::shared_ptr<Operation> send) {
  Peer& target = peer(to);
  if (target.writer) {
    target.frames.push_back({send ? small_head(message) : encode(message), std::move(send)});
    send_records(target);
    if (!target.frames.empty()) make_busy(to);
    return;
  }
  world_.link(to).send(encode_head(message), message.payload);
  if (send) finish_(*send, SPARKHVD_OK, {});
}

bool PointToPoint::receive(const std::function<void(Rank, const std::string&)>& lose) {
  bool moved = false;
  for (const Rank mate : local_peers_) {
    try {
      moved |= receive_records(mate, peer(mate));
    } catch (const Error& error) {
      if (error.status() != SPARKHVD_PEER_LOST) throw;
      lose(mate, std::string("it sent ") + error.what());
      return true;
    }
  }
  return moved;
}

bool PointToPoint::receive_records(Rank from, Peer& source) {
  int count = 0;
  while (const auto record = source.reader->next()) {
    if (record->kind == kChunkRecord) {
      receive_chunk(source, *record);
    } else if (record->kind == kSmallRecord) {
      receive_small(from, source, *record);
    } else {
      receive_frame(from, source, *record);
    }
    if (++count == kRecordsAtOnce) break;
  }
  // Wakes the writer, because it may sleep until there is room.
  if (count > 0) {
    const Rank ranks[] = {from};
    world_.wakeup().ring(ranks);
  }
  return count > 0;
}

void PointToPoint::receive_frame(Rank from, Peer& source, const LaneRecord& record) {
  Bytes frame(record.bytes);
  source.reader->read(frame);
  source.reader->pop(record);
  if (frame.size() < kFrameHeaderBytes) throw nonsense("a short frame");
  const auto header = decode_header(std::span(frame).first(kFrameHeaderBytes));
  const auto body = std::span<const std::byte>(frame).subspan(kFrameHeaderBytes);
  if (header.type != FrameType::kPoint || header.body_bytes != body.size()) {
    throw nonsense("an unexpected frame");
  }
  on_frame(from, decode<Point>(body));
}

void PointToPoint::receive_small(Rank from, Peer& source, const LaneRecord& record) {
  SmallHead head;
  if (record.bytes < sizeof(head)) throw nonsense("a short message");
  source.reader->read(std::as_writable_bytes(std::span(&head, 1)));
  const auto dtype = to_dtype(head.dtype);
  if (!dtype) throw nonsense("a message of an unknown element type");
  arrive_small({head.process_set, from, head.tag},
               {*dtype, record.bytes - sizeof(head), head.number, false, {}, {}},
               [&](std::span<std::byte> target) { source.reader->read(target, sizeof(head)); });
  source.reader->pop(record);
}

void PointToPoint::receive_chunk(Peer& source, const LaneRecord& record) {
  if (source.incoming.empty() || record.bytes > source.incoming.front().left.size()) {
    throw nonsense("bytes that were not requested");
  }
  Incoming& incoming = source.incoming.front();
  source.received_at = Clock::now();
  source.reader->read(incoming.left.first(record.bytes));
  source.reader->pop(record);
  incoming.left = incoming.left.subspan(record.bytes);
  if (!incoming.left.empty()) return;
  Incoming done = std::move(incoming);
  source.incoming.pop_front();
  complete(*done.receive.operation, rank_of(source), done.bytes);
}

bool PointToPoint::send_records(Peer& target) {
  bool moved = false;
  while (!target.frames.empty()) {
    const Frame& next = target.frames.front();
    const bool is_written =
        next.send ? target.writer->write(kSmallRecord, next.head, input_of(*next.send))
                  : target.writer->write(kFrameRecord, next.head);
    if (!is_written) break;
    const auto send = next.send;
    target.frames.pop_front();
    if (send) finish_(*send, SPARKHVD_OK, {});
    moved = true;
  }
  for (int count = 0; target.frames.empty() && !target.outgoing.empty(); ++count) {
    Outgoing& outgoing = target.outgoing.front();
    const auto chunk =
        outgoing.left.first(std::min(outgoing.left.size(), target.writer->max_record() / 64 * 64));
    if (count == kRecordsAtOnce || !target.writer->write(kChunkRecord, chunk)) break;
    moved = true;
    target.sent_at = Clock::now();
    outgoing.left = outgoing.left.subspan(chunk.size());
    const Rank ranks[] = {rank_of(target)};
    world_.wakeup().ring(ranks);
    if (!outgoing.left.empty()) continue;
    const auto operation = outgoing.operation;
    target.outgoing.pop_front();
    finish_(*operation, SPARKHVD_OK, {});
  }
  if (moved) {
    const Rank ranks[] = {rank_of(target)};
    world_.wakeup().ring(ranks);
  }
  return moved;
}

bool PointToPoint::finish_transfers(Rank rank, Peer& other) {
  bool moved = false;
  while (!other.outgoing.empty() && data_link(rank).sent(other.outgoing.front().ticket)) {
    const auto operation = other.outgoing.front().operation;
    other.outgoing.pop_front();
    finish_(*operation, SPARKHVD_OK, {});
    moved = true;
  }
  while (!other.incoming.empty() && data_link(rank).received(other.incoming.front().end)) {
    Incoming incoming = std::move(other.incoming.front());
    other.incoming.pop_front();
    moved = true;
    if (!incoming.receive.operation) continue;
    if (incoming.mark == kWhole) {
      complete(*incoming.receive.operation, rank, incoming.bytes);
    } else {
      take_next(rank, std::move(incoming.receive));
    }
  }
  return moved;
}

bool PointToPoint::step() {
  bool moved = false;
  for (std::size_t i = 0; i < busy_.size();) {
    const Rank rank = busy_[i];
    Peer& other = peer(rank);
    moved |= other.writer ? send_records(other) : finish_transfers(rank, other);
    if (!other.is_idle()) {
      ++i;
      continue;
    }
    other.is_busy = false;
    busy_[i] = busy_.back();
    busy_.pop_back();
  }
  return moved;
}

}  // namespace sparkhvd
