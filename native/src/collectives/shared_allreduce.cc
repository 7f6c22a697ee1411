// Allreduce inside a host. Chunks pass through the slots of shared memory as a pipeline. For each chunk a rank does:
//   copy in   copies its input of the slices that other ranks reduce into its slot
//   reduce    reduces its own slice from its tensor and all other slots in rank order, into its slot and its tensor
//   copy out  copies the other slices of the result from the slots of the other ranks
// A rank refills a slot only when every rank has copied its results out. Slice r of rank r's slot holds no input,
// because rank r reads its own input from its tensor, so the slice holds the result.
#include <array>
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/stream_copy.h"

namespace sparkhvd {
namespace {

/// Bytes of a chunk: they pass through a slot at once.
std::size_t chunk_size(const Communicator& communicator, DType dtype) {
  return communicator.knobs().chunk_bytes / element_size(dtype) * element_size(dtype);
}

// From this size on a result that is not in place is written past the cache. This was 10 to 20 % faster from 16 MiB. In
// place it was slower, because the lines have just been read into the cache.
constexpr std::size_t kStreamBytes = 8 << 20;

class SharedAllreduce {
 public:
  explicit SharedAllreduce(const Context& context)
      : communicator_(context.communicator),
        team_(context.team),
        kernels_(context.kernels),
        pieces_(context.operation.pieces),
        dtype_(context.operation.descriptor.dtype),
        op_(kernel_op(context)),
        scaling_(scaling_of(context)),
        element_(element_size(dtype_)),
        chunk_bytes_(chunk_size(communicator_, dtype_)),
        first_(communicator_.next_chunk()),
        sources_(team_.local_size()) {}

  void copy_in(std::uint64_t chunk) {
    std::byte* slot = communicator_.own_slot(first_ + chunk);
    for (std::size_t local = 0; local < sources_.size(); ++local) {
      if (local == team_.local_index()) continue;
      const Range slice = slice_of(chunk, local);
      pieces_.read(chunk * chunk_bytes_ + slice.begin, {slot + slice.begin, slice.size});
    }
    communicator_.publish(Stage::kCopiedIn, after(chunk));
  }

  void reduce(std::uint64_t chunk) {
    const std::size_t me = team_.local_index();
    const Range slice = slice_of(chunk, me);
    std::byte* result = communicator_.own_slot(first_ + chunk) + slice.begin;
    const std::size_t begin = chunk * chunk_bytes_ + slice.begin;
    pieces_.for_range(begin, slice.size, [&](const Pieces::Part& part) {
      for (std::size_t local = 0; local < sources_.size(); ++local) {
        sources_[local] = local == me ? part.input
                                      : communicator_.slot(team_.island()[local], first_ + chunk) +
                                            slice.begin + part.offset;
      }
      const bool streams = streams_to(part);
      const std::array<void*, 2> places{result + part.offset, part.output};
      kernels_.reduce_to_all(dtype_, op_, std::span(places).first(streams ? 1 : 2), sources_,
                             part.bytes / element_, scaling_);
    });
    communicator_.publish(Stage::kReduced, after(chunk));
    pieces_.for_range(begin, slice.size, [&](const Pieces::Part& part) {
      if (streams_to(part)) stream_copy(part.output, result + part.offset, part.bytes);
    });
  }

  void copy_out(std::uint64_t chunk) {
    for (std::size_t local = 0; local < sources_.size(); ++local) {
      if (local == team_.local_index()) continue;
      const Range slice = slice_of(chunk, local);
      const std::byte* slot =
          communicator_.slot(team_.island()[local], first_ + chunk) + slice.begin;
      pieces_.for_range(chunk * chunk_bytes_ + slice.begin, slice.size,
                        [&](const Pieces::Part& part) {
                          if (streams_to(part)) {
                            stream_copy(part.output, slot + part.offset, part.bytes);
                          } else {
                            std::memcpy(part.output, slot + part.offset, part.bytes);
                          }
                        });
    }
    communicator_.publish(Stage::kCopiedOut, after(chunk));
  }

  std::uint64_t number(std::uint64_t chunk) const noexcept { return first_ + chunk; }
  std::uint64_t after(std::uint64_t chunk) const noexcept { return first_ + chunk + 1; }

 private:
  bool streams_to(const Pieces::Part& part) const noexcept {
    return pieces_.bytes() >= kStreamBytes && part.output != part.input;
  }
  /// Bytes of `chunk` that rank `local` reduces.
  Range slice_of(std::uint64_t chunk, std::size_t local) const noexcept {
    const std::size_t bytes = std::min(chunk_bytes_, pieces_.bytes() - chunk * chunk_bytes_);
    const Range elements = part_of(bytes / element_, sources_.size(), local, element_);
    return {elements.begin * element_, elements.size * element_};
  }

  Communicator& communicator_;
  const Team& team_;
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

std::uint64_t shared_allreduce_chunks(const Communicator& communicator,
                                      const Descriptor& descriptor) {
  const std::size_t chunk = chunk_size(communicator, descriptor.dtype);
  return (total_bytes(descriptor) + chunk - 1) / chunk;
}

Task shared_allreduce(Context& context) {
  Communicator& communicator = context.communicator;
  SharedAllreduce work(context);
  const std::uint64_t chunks = shared_allreduce_chunks(communicator, context.operation.descriptor);
  communicator.advance_chunks(chunks);
  context.algorithm = "shared";
  // With 2 slots the copy out of a chunk must come before the copy in of the chunk after the next.
  const std::uint64_t reduce_lag = communicator.num_slots() > 2 ? 1 : 0;
  const std::uint64_t out_lag = reduce_lag + 1;
  for (std::uint64_t step = 0; step < chunks + out_lag; ++step) {
    if (step < chunks) {
      co_await slot_is_free(communicator, work.number(step));
      work.copy_in(step);
    }
    if (step >= reduce_lag && step - reduce_lag < chunks) {
      co_await communicator.reached(context.team, Stage::kCopiedIn, work.after(step - reduce_lag));
      work.reduce(step - reduce_lag);
    }
    if (step >= out_lag) {
      co_await communicator.reached(context.team, Stage::kReduced, work.after(step - out_lag));
      work.copy_out(step - out_lag);
    }
  }
}

}  // namespace sparkhvd
