// Allreduce of tensors in memory that all ranks of the host have mapped. A chunk is added up in rank order directly
// from all buffers, and the result is stored to all buffers.
//
// The tensor is cut into one slice per rank, and the slices into chunks. Every rank first claims chunks of its own
// slice, so that it uses the same cache lines in the next operation. Then it claims chunks of the other slices. So a
// rank that has submitted and is busy with other work delays no other rank.
#include <algorithm>
#include <cstdint>

#include "collectives/claims.h"
#include "collectives/collectives.h"

namespace sparkhvd {
namespace {

// Smallest number of chunks per slice of a large tensor. Small chunks let other ranks take over more of a straggler's
// slice.
constexpr std::size_t kMinChunks = 8;

class RegisteredAllreduce {
 public:
  explicit RegisteredAllreduce(Context& context)
      : context_(context),
        team_(context.team),
        dtype_(context.operation.descriptor.dtype),
        op_(kernel_op(context)),
        scaling_(scaling_of(context)),
        count_(context.operation.pieces.bytes() / element_size(dtype_)),
        chunk_(std::max(context.communicator.knobs().chunk_bytes / element_size(dtype_),
                        count_ / team_.size() / kMinChunks)),
        done_(context.communicator.claim(team_.island()[0], context.agreed.sequence).done,
              context.agreed.sequence) {
    for (std::size_t i = 0; i < team_.size(); ++i) {
      total_chunks_ += num_chunks(i);
      places_.push_back(nullptr);
      sources_.push_back(nullptr);
    }
  }

  /// Claims and reduces chunks until all chunks are claimed. Chunks of other ranks may then be unfinished.
  void work() {
    std::uint64_t finished = 0;
    for (std::size_t i = 0; i < team_.size(); ++i) {
      const std::size_t owner = (team_.local_index() + i) % team_.size();
      const TaggedCount next(
          context_.communicator.claim(team_.island()[owner], context_.agreed.sequence).next,
          context_.agreed.sequence);
      const std::uint64_t chunks = num_chunks(owner);
      while (next.get() < chunks) {
        const std::uint64_t chunk = next.add_one();
        if (chunk >= chunks) break;
        reduce(owner, chunk);
        finished = done_.add_one() + 1;
      }
    }
    if (finished == total_chunks_) context_.communicator.ring();
  }
  AllCounted finished() const { return {done_, total_chunks_, team_}; }

 private:
  Range slice(std::size_t owner) const noexcept {
    return part_of(count_, team_.size(), owner, element_size(dtype_));
  }
  std::uint64_t num_chunks(std::size_t owner) const noexcept {
    return (slice(owner).size + chunk_ - 1) / chunk_;
  }
  void reduce(std::size_t owner, std::uint64_t chunk) {
    const Range all = slice(owner);
    const std::size_t count = std::min(chunk_, all.size - chunk * chunk_);
    const std::size_t begin = (all.begin + chunk * chunk_) * element_size(dtype_);
    for (std::size_t i = 0; i < places_.size(); ++i) {
      places_[i] = context_.operation.registered[i] + begin;
      sources_[i] = places_[i];
    }
    context_.kernels.reduce_to_all(dtype_, op_, places_, sources_, count, scaling_);
  }

  Context& context_;
  const Team& team_;
  DType dtype_;
  ReduceOp op_;
  Scaling scaling_;
  std::size_t count_;
  std::size_t chunk_;  // elements of a chunk
  std::uint64_t total_chunks_ = 0;
  TaggedCount done_;
  std::vector<void*> places_;
  std::vector<const void*> sources_;
};

}  // namespace

Task registered_allreduce(Context& context) {
  context.algorithm = "registered";
  co_await context.communicator.claim_is_free(context.agreed.sequence);
  RegisteredAllreduce allreduce(context);
  allreduce.work();
  co_await allreduce.finished();
}

}  // namespace sparkhvd
