// The path of messages from one rank of a host to another: a ring of records in shared memory. The writer's
// piece has the ring, the reader's piece its read position.
//
// **Why nothing is overwritten.** The writer checks the reader's position. Neither trusts the other: an
// impossible position or length is an error, never an address.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "error.h"
#include "transport/wakeup_event.h"

namespace sparkhvd {

/// Header of a rank's memory for one other rank of its host; the bytes of the ring follow.
struct Lane {
  SharedWord taken;    // of the other's ring by this rank
  SharedWord written;  // to this rank's ring for the other

  /// Bytes of a ring, of one lane in a piece, and of all lanes, by the number of ranks of the host.
  static constexpr std::size_t ring_bytes(std::size_t ranks) noexcept {
    std::size_t bytes = 512 << 10;
    while (bytes > (16 << 10) && bytes * ranks > (2 << 20)) bytes /= 2;
    return bytes;
  }
  static constexpr std::size_t bytes(std::size_t ranks) noexcept;
  static constexpr std::size_t bytes_of_all(std::size_t ranks) noexcept {
    return (ranks * bytes(ranks) + 4095) / 4096 * 4096;
  }
  std::byte* ring() noexcept { return reinterpret_cast<std::byte*>(this + 1); }
  const std::byte* ring() const noexcept { return reinterpret_cast<const std::byte*>(this + 1); }
};
constexpr std::size_t Lane::bytes(std::size_t ranks) noexcept {
  return sizeof(Lane) + ring_bytes(ranks);
}

/// Before every record: its length and kind.
struct LaneRecord {
  std::uint32_t bytes = 0;
  std::uint32_t kind = 0;
};

class LaneWriter {
 public:
  /// `own`: this rank's lane for the other; `theirs`: the other's for this rank.
  LaneWriter(Lane& own, const Lane& theirs, std::size_t ring_bytes)
      : own_(&own), theirs_(&theirs), size_(ring_bytes) {}

  /// Largest record: several fit, so that one is read while the next is written.
  std::size_t max_record() const noexcept { return size_ / 4 - sizeof(LaneRecord); }

  /// False, without any effect, if there is no room. Throws Error if the reader's position is impossible.
  bool write(std::uint32_t kind, std::span<const std::byte> head,
             std::span<const std::byte> body = {}) {
    const std::uint64_t taken = theirs_->taken.value.load(std::memory_order_acquire);
    if (taken > position_ || position_ - taken > size_) throw nonsense("an impossible position");
    const std::size_t bytes = head.size() + body.size();
    const std::size_t space = space_of(bytes);
    if (position_ - taken + space > size_) return false;
    const LaneRecord record{static_cast<std::uint32_t>(bytes), kind};
    put(position_, std::as_bytes(std::span(&record, 1)));
    put(position_ + sizeof(record), head);
    put(position_ + sizeof(record) + head.size(), body);
    position_ += space;
    // seq_cst against the sleeping words: see transport/wakeup_event.h.
    own_->written.value.store(position_, std::memory_order_seq_cst);
    return true;
  }

  static constexpr std::size_t space_of(std::size_t bytes) noexcept {
    return sizeof(LaneRecord) + (bytes + 7) / 8 * 8;
  }

 private:
  void put(std::uint64_t position, std::span<const std::byte> bytes) noexcept {
    const std::size_t begin = position % size_;
    const std::size_t first = std::min(bytes.size(), size_ - begin);
    if (first > 0) std::memcpy(own_->ring() + begin, bytes.data(), first);
    if (bytes.size() > first) {
      std::memcpy(own_->ring(), bytes.data() + first, bytes.size() - first);
    }
  }

  Lane* own_;
  const Lane* theirs_;
  std::size_t size_;
  std::uint64_t position_ = 0;
};

class LaneReader {
 public:
  LaneReader(Lane& own, const Lane& theirs, std::size_t ring_bytes)
      : own_(&own), theirs_(&theirs), size_(ring_bytes) {}

  /// The next record, if any. Throws Error if the record is impossible.
  std::optional<LaneRecord> next() const {
    const std::uint64_t written = theirs_->written.value.load(std::memory_order_seq_cst);
    if (written == position_) return std::nullopt;
    const std::uint64_t available = written - position_;
    LaneRecord record;
    get(position_, std::as_writable_bytes(std::span(&record, 1)));
    if (available > size_ || record.bytes > size_ / 4 ||
        LaneWriter::space_of(record.bytes) > available) {
      throw nonsense("nonsense through shared memory");
    }
    return record;
  }
  /// Copies from the body of the next record, from `begin` on.
  void read(std::span<std::byte> target, std::size_t begin = 0) const noexcept {
    get(position_ + sizeof(LaneRecord) + begin, target);
  }
  void pop(const LaneRecord& record) noexcept {
    position_ += LaneWriter::space_of(record.bytes);
    own_->taken.value.store(position_, std::memory_order_seq_cst);
  }

 private:
  void get(std::uint64_t position, std::span<std::byte> target) const noexcept {
    const std::size_t begin = position % size_;
    const std::size_t first = std::min(target.size(), size_ - begin);
    if (first > 0) std::memcpy(target.data(), theirs_->ring() + begin, first);
    if (target.size() > first) {
      std::memcpy(target.data() + first, theirs_->ring(), target.size() - first);
    }
  }

  Lane* own_;
  const Lane* theirs_;
  std::size_t size_;
  std::uint64_t position_ = 0;
};

}  // namespace sparkhvd
