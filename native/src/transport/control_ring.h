// A ring in shared memory for small control frames, because a connection costs a system call at each end.
//
// One rank writes. A reader copies a frame before it parses the frame, because the writer could change the memory
// meanwhile. Positions count bytes since the start. Larger frames use the connection.
//
// **Overwriting.** The writer knows the position of the slowest reader and never overwrites unread frames. A reader
// checks every position and length, because a peer may be corrupt.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "error.h"
#include "message.h"
#include "transport/wakeup_event.h"

namespace sparkhvd {

struct ControlRing {
  static constexpr std::size_t kBytes = 16 << 10;
  static constexpr std::size_t kMaxFrame = 4 << 10;

  SharedWord written;
  std::byte bytes[kBytes];

  /// Bytes that a frame takes in the ring: its length, and the frame rounded up to a multiple of 8 bytes.
  static constexpr std::size_t space(std::size_t frame) noexcept {
    return sizeof(std::uint64_t) + (frame + 7) / 8 * 8;
  }
};

class ControlWriter {
 public:
  explicit ControlWriter(ControlRing& ring) : ring_(&ring) {}

  /// Writes a frame. False, without any effect, if it does not fit. `taken`: position of the slowest reader.
  bool write(std::span<const std::byte> frame, std::uint64_t taken) noexcept {
    if (frame.size() > ControlRing::kMaxFrame || taken > position_) return false;
    if (position_ - taken + ControlRing::space(frame.size()) > ControlRing::kBytes) return false;
    const std::uint64_t length = frame.size();
    put(position_, std::as_bytes(std::span(&length, 1)));
    put(position_ + sizeof(length), frame);
    position_ += ControlRing::space(frame.size());
    // seq_cst orders this store before the read of the peers' sleep words: see wakeup_event.h.
    ring_->written.value.store(position_, std::memory_order_seq_cst);
    return true;
  }

 private:
  void put(std::uint64_t position, std::span<const std::byte> bytes) noexcept {
    const std::size_t begin = position % ControlRing::kBytes;
    const std::size_t first = std::min(bytes.size(), ControlRing::kBytes - begin);
    std::memcpy(ring_->bytes + begin, bytes.data(), first);
    std::memcpy(ring_->bytes, bytes.data() + first, bytes.size() - first);
  }

  ControlRing* ring_;
  std::uint64_t position_ = 0;
};

class ControlReader {
 public:
  /// `taken`: word in shared memory through which the writer sees this reader's position.
  ControlReader(Rank from, const ControlRing& ring, SharedWord& taken)
      : from_(from), ring_(&ring), taken_(&taken) {}

  Rank from() const noexcept { return from_; }

  /// A copy of the next frame, including its header; empty if there is no frame. Returns the same frame until `pop`.
  /// Throws Error with a phrase about the invalid data if the frame is invalid.
  const Bytes& next() {
    if (!frame_.empty()) return frame_;
    const std::uint64_t written = ring_->written.value.load(std::memory_order_seq_cst);
    if (written == position_) return frame_;
    const std::uint64_t available = written - position_;
    std::uint64_t length = 0;
    get(position_, std::as_writable_bytes(std::span(&length, 1)));
    if (available > ControlRing::kBytes || length < kFrameHeaderBytes ||
        length > ControlRing::kMaxFrame || ControlRing::space(length) > available) {
      throw Error(SPARKHVD_PEER_LOST, "an invalid frame through shared memory");
    }
    frame_.resize(length);
    get(position_ + sizeof(length), frame_);
    return frame_;
  }

  void pop() noexcept {
    position_ += ControlRing::space(frame_.size());
    frame_.clear();
    taken_->value.store(position_, std::memory_order_release);
  }

 private:
  void get(std::uint64_t position, std::span<std::byte> target) const noexcept {
    const std::size_t begin = position % ControlRing::kBytes;
    const std::size_t first = std::min(target.size(), ControlRing::kBytes - begin);
    std::memcpy(target.data(), ring_->bytes + begin, first);
    std::memcpy(target.data() + first, ring_->bytes, target.size() - first);
  }

  Rank from_;
  const ControlRing* ring_;
  SharedWord* taken_;
  std::uint64_t position_ = 0;
  Bytes frame_;
};

}  // namespace sparkhvd
