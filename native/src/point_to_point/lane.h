// The path of messages from one rank of a host to another: a ring of records in shared memory. The ring is in the
// writer's piece of the memory, the read position in the reader's piece.
//
// **Overwriting.** The writer checks the reader's position and never overwrites unread records. Both check what the
// other rank has written: an invalid position or length is an Error and never becomes an address.
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

/// A rank's memory for messages with one other rank of its host. The bytes of the ring follow this header.
struct Lane {
  SharedWord taken;    // position up to which this rank has read the other rank's ring
  SharedWord written;  // position up to which this rank has written its own ring

  // Sizes by the number of ranks of the host: of a ring, of a lane, and of all lanes of a rank.
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

/// Header of a record in the ring: its length and kind.
struct LaneRecord {
  std::uint32_t bytes = 0;
  std::uint32_t kind = 0;
};

class LaneWriter {
 public:
  /// `own`: this rank's lane for the other rank; `theirs`: the other rank's lane for this rank.
  LaneWriter(Lane& own, const Lane& theirs, std::size_t ring_bytes)
      : own_(&own), theirs_(&theirs), size_(ring_bytes) {}

  /// Largest record. Several records fit into the ring, so that the reader reads a record while the writer writes the
  /// next.
  std::size_t max_record() const noexcept { return size_ / 4 - sizeof(LaneRecord); }

  /// Writes a record. False, without any effect, if the ring has no room. Throws Error if the reader's position is
  /// invalid.
  bool write(std::uint32_t kind, std::span<const std::byte> head,
             std::span<const std::byte> body = {}) {
    const std::uint64_t taken = theirs_->taken.value.load(std::memory_order_acquire);
    if (taken > position_ || position_ - taken > size_)
      throw nonsense("an invalid position in shared memory");
    const std::size_t bytes = head.size() + body.size();
    const std::size_t space = space_of(bytes);
    if (position_ - taken + space > size_) return false;
    const LaneRecord record{static_cast<std::uint32_t>(bytes), kind};
    put(position_, std::as_bytes(std::span(&record, 1)));
    put(position_ + sizeof(record), head);
    put(position_ + sizeof(record) + head.size(), body);
    position_ += space;
    // seq_cst orders this store before the read of the peer's sleep word: see transport/wakeup_event.h.
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

  /// The next record, if any. Throws Error if the record is invalid.
  std::optional<LaneRecord> next() const {
    const std::uint64_t written = theirs_->written.value.load(std::memory_order_seq_cst);
    if (written == position_) return std::nullopt;
    const std::uint64_t available = written - position_;
    LaneRecord record;
    get(position_, std::as_writable_bytes(std::span(&record, 1)));
    if (available > size_ || record.bytes > size_ / 4 ||
        LaneWriter::space_of(record.bytes) > available) {
      throw nonsense("an invalid record through shared memory");
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
