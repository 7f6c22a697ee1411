// The bytes of messages on their way: through lanes inside a host, on connections between hosts.
#include <algorithm>
#include <utility>

#include "point_to_point/operations.h"
#include "point_to_point/point_to_point.h"

namespace sparkhvd {
namespace {

constexpr std::uint32_t kFrameRecord = 0;
constexpr std::uint32_t kChunkRecord = 1;
// Records of one lane before the others get their turn.
constexpr int kRecordsAtOnce = 64;

}  // namespace

/// `send`: the small message that this is; it is sent once its bytes are out of the caller's memory and on the way.
void PointToPoint::tell(Rank to, const Point& message, std::shared_ptr<Operation> send) {
  Peer& target = peer(to);
  if (target.writer) {
    target.frames.push_back({encode(message), std::move(send)});
    send_records(target);
    return;
  }
  world_.link(to).send(encode(message));
  if (send) finish_(*send, SPARKHVD_OK, {});
}

bool PointToPoint::receive(const std::function<void(Rank, const std::string&)>& lose) {
  bool moved = false;
  for (Peer& source : peers_) {
    if (!source.reader) continue;
    try {
      moved |= receive_records(rank_of(source), source);
    } catch (const Error& error) {
      if (error.status() != SPARKHVD_PEER_LOST) throw;
      lose(rank_of(source), std::string("it sent ") + error.what());
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
    } else {
      Bytes frame(record->bytes);
      source.reader->read(frame);
      source.reader->pop(*record);
      if (frame.size() < kFrameHeaderBytes) throw nonsense("a short frame");
      const auto header = decode_header(std::span(frame).first(kFrameHeaderBytes));
      const auto body = std::span<const std::byte>(frame).subspan(kFrameHeaderBytes);
      if (header.type != FrameType::kPoint || header.body_bytes != body.size()) {
        throw nonsense("a frame out of turn");
      }
      on_frame(from, decode<Point>(body));
    }
    if (++count == kRecordsAtOnce) break;
  }
  // The writer may sleep until there is room.
  if (count > 0) {
    const Rank ranks[] = {from};
    world_.bell().ring(ranks);
  }
  return count > 0;
}

void PointToPoint::receive_chunk(Peer& source, const LaneRecord& record) {
  if (source.incoming.empty() || record.bytes > source.incoming.front().left.size()) {
    throw nonsense("bytes that nobody asked for");
  }
  Incoming& incoming = source.incoming.front();
  source.reader->read(incoming.left.first(record.bytes));
  source.reader->pop(record);
  incoming.left = incoming.left.subspan(record.bytes);
  if (!incoming.left.empty()) return;
  const auto receive = incoming.receive.operation;
  source.incoming.pop_front();
  complete(*receive, rank_of(source));
}

bool PointToPoint::send_records(Peer& target) {
  bool moved = false;
  while (!target.frames.empty() &&
         target.writer->write(kFrameRecord, target.frames.front().bytes)) {
    const auto send = std::move(target.frames.front().send);
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
    outgoing.left = outgoing.left.subspan(chunk.size());
    const Rank ranks[] = {rank_of(target)};
    world_.bell().ring(ranks);
    if (!outgoing.left.empty()) continue;
    const auto operation = outgoing.operation;
    target.outgoing.pop_front();
    finish_(*operation, SPARKHVD_OK, {});
  }
  if (moved) {
    const Rank ranks[] = {rank_of(target)};
    world_.bell().ring(ranks);
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
  while (!other.incoming.empty() && data_link(rank).received(other.incoming.front().ticket)) {
    Incoming incoming = std::move(other.incoming.front());
    other.incoming.pop_front();
    if (incoming.is_void) {
      post_again(std::move(incoming.receive));
    } else {
      complete(*incoming.receive.operation, rank);
    }
    moved = true;
  }
  return moved;
}

bool PointToPoint::step() {
  bool moved = false;
  for (Peer& other : peers_) {
    if (other.frames.empty() && other.outgoing.empty() && other.incoming.empty()) continue;
    moved |= other.writer ? send_records(other) : finish_transfers(rank_of(other), other);
  }
  return moved;
}

}  // namespace sparkhvd
