// One submitted operation, from submission until its caller releases it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "message.h"
#include "progress_timeout.h"
#include "segment.h"
#include "trace.h"
#include "types.h"

namespace sparkhvd {

namespace nccl {
struct OnDevice;
}

/// A list of tensors, addressed as one sequence of bytes. Collectives reduce many private tensors together without
/// copying them into a fusion buffer.
class Pieces {
 public:
  /// Part of one tensor; `offset` is its position in the requested range.
  struct Part {
    const std::byte* input;
    std::byte* output;
    std::size_t offset;
    std::size_t bytes;
  };

  void add(const void* input, void* output, std::size_t bytes) {
    if (bytes == 0) return;
    pieces_.push_back(
        {static_cast<const std::byte*>(input), static_cast<std::byte*>(output), total_});
    total_ += bytes;
  }

  std::size_t bytes() const noexcept { return total_; }

  /// The whole sequence, if all tensors form one range of memory and each output is its input; else empty.
  std::span<std::byte> single_range() const noexcept {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (piece.output != piece.input || piece.input != pieces_[0].input + piece.begin) return {};
    }
    if (pieces_.empty()) return {};
    return {pieces_[0].output, total_};
  }

  /// Calls `use(Part)` for every part of [begin, begin + bytes), in order.
  template <class Use>
  void for_range(std::size_t begin, std::size_t bytes, Use use) const {
    if (bytes == 0) return;
    auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                  [](std::size_t at, const Piece& p) { return at < p.begin; });
    --piece;
    for (std::size_t done = 0; done < bytes; ++piece) {
      const std::size_t skip = begin + done - piece->begin;
      const auto next = piece + 1;
      const std::size_t end = next == pieces_.end() ? total_ : next->begin;
      const std::size_t count = std::min(bytes - done, end - (begin + done));
      std::byte* output = piece->output == nullptr ? nullptr : piece->output + skip;
      use(Part{piece->input + skip, output, done, count});
      done += count;
    }
  }

  void read(std::size_t begin, std::span<std::byte> target) const {
    for_range(begin, target.size(), [&](const Part& part) {
      std::memcpy(target.data() + part.offset, part.input, part.bytes);
    });
  }

  void write(std::size_t begin, std::span<const std::byte> source) const {
    for_range(begin, source.size(), [&](const Part& part) {
      std::memcpy(part.output, source.data() + part.offset, part.bytes);
    });
  }

 private:
  struct Piece {
    const std::byte* input;
    std::byte* output;
    std::size_t begin;
  };
  std::vector<Piece> pieces_;
  std::size_t total_ = 0;
};

struct Operation {
  std::int32_t process_set = 0;
  std::string name;
  Descriptor descriptor;
  Pieces pieces;   // the inputs, with their outputs if input and output have the same size
  Pieces results;  // reducescatter: the outputs; each is also its own `input`
  std::vector<std::byte*>
      outputs;  // by tensor: the caller's memory for a result of negotiated size, if given
  std::optional<std::size_t> mailbox;  // the mailbox with a copy of the input, if any
  /// Inputs by rank of this rank's island, if all are in registered memory; nullptr for a rank that does not
  /// contribute.
  std::vector<std::byte*> registered;
  OperationTrace trace;
  ProgressTimeout timeout;  // collectives: until the coordinator answers; messages: until the end

  /// Longest wait for the coordinator's answer. The coordinator gives up after `timeout_s` and names the missing ranks,
  /// so this rank waits a few seconds longer for that report.
  double coordinator_patience_s() const noexcept { return descriptor.timeout_s + 5; }

  // Results that the engine allocates, written before the operation is finished. `rows`: allgather and gather
  // [tensor][member]; scatter: this rank's rows; alltoall [member]; join: the rank that joined last; process set: its
  // id.
  std::unique_ptr<std::byte[]> output;
  std::size_t output_bytes = 0;
  std::vector<std::int64_t> rows;
  std::shared_ptr<Segment> segment;  // SPARKHVD_REGISTER: the registered memory
  /// Set if the tensors are on the device; `pieces` then has only their number of bytes.
  std::shared_ptr<nccl::OnDevice> on_device;

  // `message` is written before `status` changes from PENDING, and never afterwards.
  std::atomic<std::int32_t> status{SPARKHVD_PENDING};
  std::string message;

  std::string label() const;
  bool is_finished() const noexcept {
    return status.load(std::memory_order_acquire) != SPARKHVD_PENDING;
  }
};

}  // namespace sparkhvd
