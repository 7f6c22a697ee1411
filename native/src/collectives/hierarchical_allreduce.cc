// Allreduce over several islands. As in shared_allreduce, chunks pass through the island's slots;
// but the slice that a rank reduces there is a partial result, which it adds up with the same slice
// of the other islands before it puts it back. There are as many slices as the smallest island has
// ranks; further ranks of larger islands only copy in and out.
#include <algorithm>
#include <memory>

#include "collectives/collectives.h"

namespace sparkhvd {
namespace {

/// Chunks in flight in a world without any shared memory, per rank: a ring's messages should stay
/// long.
constexpr std::size_t kLonelyBytes = 64 << 10;

class HierarchicalAllreduce {
 public:
  explicit HierarchicalAllreduce(const Context& context)
      : communicator_(context.communicator),
        kernels_(context.kernels),
        pieces_(context.operation.pieces),
        dtype_(context.operation.descriptor.dtype),
        op_(kernel_op(context)),
        scaling_(scaling_of(context)),
        element_(element_size(dtype_)),
        accumulator_(element_size(accumulation_type(dtype_))),
        chunk_bytes_(chunk_size() / accumulator_ * element_),
        first_(communicator_.next_chunk()),
        sources_(communicator_.local_size()) {
    const std::size_t largest = part_of(chunk_bytes_ / element_, lanes(), 0, element_).size;
    partial_ = std::make_unique_for_overwrite<std::byte[]>(largest * accumulator_);
    if (!is_shared()) result_ = std::make_unique_for_overwrite<std::byte[]>(largest * element_);
  }

  bool is_shared() const noexcept { return communicator_.local_size() > 1; }
  bool has_slice() const noexcept { return communicator_.local_index() < lanes(); }
  std::uint64_t num_chunks() const noexcept {
    return (pieces_.bytes() + chunk_bytes_ - 1) / chunk_bytes_;
  }
  std::uint64_t free_before(std::uint64_t chunk) const noexcept {
    const std::uint64_t number = first_ + chunk + 1;
    return number > communicator_.num_slots() ? number - communicator_.num_slots() : 0;
  }
  std::uint64_t after(std::uint64_t chunk) const noexcept { return first_ + chunk + 1; }

  void copy_in(std::uint64_t chunk) {
    std::byte* slot = communicator_.own_slot(first_ + chunk);
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      if (lane == communicator_.local_index()) continue;
      const Range slice = slice_of(chunk, lane);
      pieces_.read(chunk * chunk_bytes_ + slice.begin, {slot + slice.begin, slice.size});
    }
    communicator_.publish(Stage::kCopiedIn, after(chunk));
  }

  /// This rank's slice, added up inside the island.
  CrossExchange reduce(std::uint64_t chunk) {
    const std::size_t me = communicator_.local_index();
    const Range slice = slice_of(chunk, me);
    pieces_.for_range(
        chunk * chunk_bytes_ + slice.begin, slice.size, [&](const Pieces::Part& part) {
          for (std::size_t local = 0; local < sources_.size(); ++local) {
            sources_[local] =
                local == me ? part.input
                            : communicator_.slot(local, first_ + chunk) + slice.begin + part.offset;
          }
          kernels_.reduce_partial(dtype_, op_,
                                  partial_.get() + part.offset / element_ * accumulator_, sources_,
                                  part.bytes / element_, scaling_);
        });
    return {partial_.get(), result_place(chunk), slice.size / element_};
  }

  /// The result of this rank's slice is in place: for the others, and for its own tensor.
  void share(std::uint64_t chunk) {
    if (is_shared()) communicator_.publish(Stage::kReduced, after(chunk));
    if (!has_slice()) return;
    const Range slice = slice_of(chunk, communicator_.local_index());
    pieces_.write(chunk * chunk_bytes_ + slice.begin, {result_place(chunk), slice.size});
  }

  void copy_out(std::uint64_t chunk) {
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      if (lane == communicator_.local_index()) continue;
      const Range slice = slice_of(chunk, lane);
      const std::byte* slot = communicator_.slot(lane, first_ + chunk);
      pieces_.write(chunk * chunk_bytes_ + slice.begin, {slot + slice.begin, slice.size});
    }
    communicator_.publish(Stage::kCopiedOut, after(chunk));
  }

 private:
  std::size_t lanes() const noexcept { return communicator_.num_lanes(); }
  /// Equal on all ranks; accumulators of a chunk fit in a slot.
  std::size_t chunk_size() const noexcept {
    const bool is_lonely = communicator_.islands().size() == communicator_.size();
    return is_lonely ? kLonelyBytes * communicator_.size() : communicator_.slot_bytes();
  }
  Range slice_of(std::uint64_t chunk, std::size_t lane) const noexcept {
    const std::size_t bytes = std::min(chunk_bytes_, pieces_.bytes() - chunk * chunk_bytes_);
    const Range elements = part_of(bytes / element_, lanes(), lane, element_);
    return {elements.begin * element_, elements.size * element_};
  }
  std::byte* result_place(std::uint64_t chunk) const noexcept {
    if (!is_shared()) return result_.get();
    return communicator_.own_slot(first_ + chunk) +
           slice_of(chunk, communicator_.local_index()).begin;
  }

  Communicator& communicator_;
  const Kernels& kernels_;
  const Pieces& pieces_;
  DType dtype_;
  ReduceOp op_;
  Scaling scaling_;
  std::size_t element_;
  std::size_t accumulator_;
  std::size_t chunk_bytes_;
  std::uint64_t first_;
  std::vector<const void*> sources_;
  std::unique_ptr<std::byte[]> partial_;
  std::unique_ptr<std::byte[]> result_;
};

}  // namespace

Task hierarchical_allreduce(Context& context) {
  Communicator& communicator = context.communicator;
  HierarchicalAllreduce work(context);
  const std::uint64_t chunks = work.num_chunks();
  const std::uint64_t lag = work.is_shared() ? 1 : 0;
  if (work.is_shared()) communicator.advance_chunks(chunks);
  for (std::uint64_t step = 0; step < chunks + lag; ++step) {
    if (work.is_shared() && step < chunks) {
      co_await communicator.reached(Stage::kCopiedOut, work.free_before(step));
      work.copy_in(step);
    }
    if (step < lag) continue;
    const std::uint64_t chunk = step - lag;
    if (work.has_slice()) {
      if (work.is_shared()) co_await communicator.reached(Stage::kCopiedIn, work.after(chunk));
      const CrossExchange exchange = work.reduce(chunk);
      co_await cross_allreduce(context, exchange);
    }
    work.share(chunk);
    if (!work.is_shared()) continue;
    co_await communicator.reached(Stage::kReduced, work.after(chunk));
    work.copy_out(chunk);
  }
}

}  // namespace sparkhvd
