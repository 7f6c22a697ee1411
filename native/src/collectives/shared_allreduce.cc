// Allreduce inside a host. Chunks pass through the slots of the ranks' shared memory as a pipeline:
//   copy in   this rank's input of the slices that others reduce, into its own slot
//   reduce    its own slice of the chunk, from its tensor and all other slots in rank order, into
//   its slot copy out  the other slices of the result, from the others' slots
// A slot is filled again only when every rank has copied it out. Slice r of rank r's slot is never
// needed as input, so the result takes its place.
#include <array>
#include <cstring>

#include "collectives/collectives.h"

namespace sparkhvd {
namespace {

// Up to here every rank reduces everything: one round of waiting instead of two, for little more
// reading.
constexpr std::size_t kSymmetricBytes = 16 << 10;

class SharedAllreduce {
 public:
  explicit SharedAllreduce(const Context& context)
      : communicator_(context.communicator),
        kernels_(context.kernels),
        pieces_(context.operation.pieces),
        dtype_(context.operation.descriptor.dtype),
        op_(kernel_op(context)),
        scaling_(scaling_of(context)),
        element_(element_size(dtype_)),
        chunk_bytes_(communicator_.slot_bytes() / element_ * element_),
        first_(communicator_.next_chunk()),
        sources_(communicator_.local_size()) {}

  bool is_symmetric() const noexcept {
    return pieces_.bytes() <= std::min(kSymmetricBytes, chunk_bytes_);
  }
  std::uint64_t num_chunks() const noexcept {
    return (pieces_.bytes() + chunk_bytes_ - 1) / chunk_bytes_;
  }

  void copy_in_all(std::uint64_t chunk) {
    pieces_.read(0, {communicator_.own_slot(first_ + chunk), pieces_.bytes()});
    communicator_.publish(Stage::kCopiedIn, first_ + chunk + 1);
  }

  void reduce_all(std::uint64_t chunk) {
    pieces_.for_range(0, pieces_.bytes(), [&](const Pieces::Part& part) {
      for (std::size_t local = 0; local < sources_.size(); ++local) {
        sources_[local] = communicator_.slot(local, first_ + chunk) + part.offset;
      }
      kernels_.reduce(dtype_, op_, part.output, sources_, part.bytes / element_, scaling_);
    });
    communicator_.publish(Stage::kReduced, first_ + chunk + 1);
    communicator_.publish(Stage::kCopiedOut, first_ + chunk + 1);
  }

  void copy_in(std::uint64_t chunk) {
    std::byte* slot = communicator_.own_slot(first_ + chunk);
    for (std::size_t local = 0; local < sources_.size(); ++local) {
      if (local == communicator_.local_index()) continue;
      const Range slice = slice_of(chunk, local);
      pieces_.read(chunk * chunk_bytes_ + slice.begin, {slot + slice.begin, slice.size});
    }
    communicator_.publish(Stage::kCopiedIn, first_ + chunk + 1);
  }

  void reduce(std::uint64_t chunk) {
    const std::size_t me = communicator_.local_index();
    const Range slice = slice_of(chunk, me);
    std::byte* result = communicator_.own_slot(first_ + chunk) + slice.begin;
    const std::size_t begin = chunk * chunk_bytes_ + slice.begin;
    pieces_.for_range(begin, slice.size, [&](const Pieces::Part& part) {
      for (std::size_t local = 0; local < sources_.size(); ++local) {
        sources_[local] =
            local == me ? part.input
                        : communicator_.slot(local, first_ + chunk) + slice.begin + part.offset;
      }
      kernels_.reduce(dtype_, op_, result + part.offset, sources_, part.bytes / element_, scaling_);
    });
    communicator_.publish(Stage::kReduced, first_ + chunk + 1);
    pieces_.write(begin, {result, slice.size});
  }

  void copy_out(std::uint64_t chunk) {
    for (std::size_t local = 0; local < sources_.size(); ++local) {
      if (local == communicator_.local_index()) continue;
      const Range slice = slice_of(chunk, local);
      const std::byte* slot = communicator_.slot(local, first_ + chunk);
      pieces_.write(chunk * chunk_bytes_ + slice.begin, {slot + slice.begin, slice.size});
    }
    communicator_.publish(Stage::kCopiedOut, first_ + chunk + 1);
  }

  /// The number of chunks that all must have copied out before `chunk` may be copied in.
  std::uint64_t free_before(std::uint64_t chunk) const noexcept {
    const std::uint64_t number = first_ + chunk + 1;
    return number > communicator_.num_slots() ? number - communicator_.num_slots() : 0;
  }
  std::uint64_t after(std::uint64_t chunk) const noexcept { return first_ + chunk + 1; }

 private:
  /// Bytes of `chunk` that rank `local` reduces.
  Range slice_of(std::uint64_t chunk, std::size_t local) const noexcept {
    const std::size_t bytes = std::min(chunk_bytes_, pieces_.bytes() - chunk * chunk_bytes_);
    const Range elements = part_of(bytes / element_, sources_.size(), local, element_);
    return {elements.begin * element_, elements.size * element_};
  }

  Communicator& communicator_;
  const Kernels& kernels_;
  const Pieces& pieces_;
  DType dtype_;
  ReduceOp op_;
  Scaling scaling_;
  std::size_t element_;
  std::size_t chunk_bytes_;
  std::uint64_t first_;
  std::vector<const void*> sources_;
};

}  // namespace

Task shared_allreduce(Context& context) {
  Communicator& communicator = context.communicator;
  SharedAllreduce work(context);
  if (work.is_symmetric()) {
    communicator.advance_chunks(1);
    co_await communicator.reached(Stage::kCopiedOut, work.free_before(0));
    work.copy_in_all(0);
    co_await communicator.reached(Stage::kCopiedIn, work.after(0));
    work.reduce_all(0);
    co_return;
  }
  const std::uint64_t chunks = work.num_chunks();
  communicator.advance_chunks(chunks);
  // With 2 slots the copy out of a chunk must come before the copy in after the next one.
  const std::uint64_t reduce_lag = communicator.num_slots() > 2 ? 1 : 0;
  const std::uint64_t out_lag = reduce_lag + 1;
  for (std::uint64_t step = 0; step < chunks + out_lag; ++step) {
    if (step < chunks) {
      co_await communicator.reached(Stage::kCopiedOut, work.free_before(step));
      work.copy_in(step);
    }
    if (step >= reduce_lag && step - reduce_lag < chunks) {
      co_await communicator.reached(Stage::kCopiedIn, work.after(step - reduce_lag));
      work.reduce(step - reduce_lag);
    }
    if (step >= out_lag) {
      co_await communicator.reached(Stage::kReduced, work.after(step - out_lag));
      work.copy_out(step - out_lag);
    }
  }
}

}  // namespace sparkhvd
