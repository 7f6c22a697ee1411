// The last step of allgather and broadcast inside a host: ranges of the result go from the ranks
// that have them to the others, through the slots of shared memory.
#include <algorithm>
#include <cstring>

#include "collectives/collectives.h"

namespace sparkhvd {
namespace {

/// The ranges that one rank gives, seen as one sequence of bytes.
class Gift {
 public:
  void add(Range range) {
    if (range.size != 0) ranges_.push_back(range);
    bytes_ += range.size;
  }
  std::size_t bytes() const noexcept { return bytes_; }

  /// Calls `use(place in the result, offset, bytes)` for the parts of [begin, begin + bytes).
  template <class Use>
  void for_range(std::size_t begin, std::size_t bytes, Use use) const {
    std::size_t start = 0;
    for (const Range& range : ranges_) {
      const std::size_t from = std::max(begin, start);
      const std::size_t to = std::min(begin + bytes, start + range.size);
      if (from < to) use(range.begin + (from - start), from - begin, to - from);
      start += range.size;
    }
  }

 private:
  std::vector<Range> ranges_;
  std::size_t bytes_ = 0;
};

}  // namespace

Task share_in_island(Context& context, std::span<std::byte> result,
                     std::span<const Contribution> contributions) {
  Communicator& communicator = context.communicator;
  if (communicator.local_size() == 1) co_return;
  std::vector<Gift> gifts(communicator.local_size());
  for (const auto& contribution : contributions) {
    gifts[contribution.local].add({contribution.begin, contribution.bytes});
  }
  const std::size_t chunk_bytes = communicator.slot_bytes();
  std::uint64_t chunks = 0;
  for (const auto& gift : gifts) {
    chunks = std::max<std::uint64_t>(chunks, (gift.bytes() + chunk_bytes - 1) / chunk_bytes);
  }
  const std::uint64_t first = communicator.next_chunk();
  const std::uint64_t slots = communicator.num_slots();
  communicator.advance_chunks(chunks);
  const auto range_of = [&](std::size_t local, std::uint64_t chunk) -> Range {
    const std::size_t begin = std::min(gifts[local].bytes(), chunk * chunk_bytes);
    return {begin, std::min(chunk_bytes, gifts[local].bytes() - begin)};
  };
  const std::size_t me = communicator.local_index();
  // One chunk is copied in while the one before is copied out.
  for (std::uint64_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      const std::uint64_t number = first + step + 1;
      co_await communicator.reached(Stage::kCopiedOut, number > slots ? number - slots : 0);
      std::byte* slot = communicator.own_slot(first + step);
      const Range mine = range_of(me, step);
      gifts[me].for_range(mine.begin, mine.size,
                          [&](std::size_t place, std::size_t offset, std::size_t bytes) {
                            std::memcpy(slot + offset, result.data() + place, bytes);
                          });
      communicator.publish(Stage::kCopiedIn, number);
    }
    if (step == 0) continue;
    const std::uint64_t chunk = step - 1;
    co_await communicator.reached(Stage::kCopiedIn, first + chunk + 1);
    for (std::size_t local = 0; local < gifts.size(); ++local) {
      if (local == me) continue;
      const std::byte* slot = communicator.slot(local, first + chunk);
      const Range theirs = range_of(local, chunk);
      gifts[local].for_range(theirs.begin, theirs.size,
                             [&](std::size_t place, std::size_t offset, std::size_t bytes) {
                               std::memcpy(result.data() + place, slot + offset, bytes);
                             });
    }
    communicator.publish(Stage::kReduced, first + chunk + 1);
    communicator.publish(Stage::kCopiedOut, first + chunk + 1);
  }
}

}  // namespace sparkhvd
