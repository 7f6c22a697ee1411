// The last step of allgather and broadcast inside an island: the owners of ranges of the result pass them to the other
// ranks, through the slots of shared memory.
#include <algorithm>

#include "collectives/collectives.h"

namespace sparkhvd {

Task share_in_island(Context& context, const Pieces& result,
                     std::span<const Contribution> contributions) {
  const Communicator& communicator = context.communicator;
  const Team& team = context.team;
  if (team.local_size() == 1) co_return;
  std::vector<RangeList> gifts(team.local_size());
  for (const auto& contribution : contributions) {
    gifts[contribution.local].add({contribution.begin, contribution.bytes});
  }
  const std::size_t chunk_bytes = communicator.knobs().chunk_bytes;
  Passage passage;
  for (const auto& gift : gifts) {
    passage.chunks = std::max(passage.chunks, (gift.size() + chunk_bytes - 1) / chunk_bytes);
  }
  passage.fill = [&](std::uint64_t chunk, std::byte* slot) {
    gifts[team.local_index()].for_range(
        chunk * chunk_bytes, chunk_bytes,
        [&](std::size_t place, std::size_t offset, std::size_t bytes) {
          result.read(place, {slot + offset, bytes});
        });
  };
  passage.take = [&](std::uint64_t chunk, std::uint64_t number) {
    for (std::size_t local = 0; local < gifts.size(); ++local) {
      if (local == team.local_index()) continue;
      const std::byte* slot = communicator.slot(team.island()[local], number);
      gifts[local].for_range(chunk * chunk_bytes, chunk_bytes,
                             [&](std::size_t place, std::size_t offset, std::size_t bytes) {
                               result.write(place, {slot + offset, bytes});
                             });
    }
  };
  co_await pass_through_slots(context, std::move(passage));
}

}  // namespace sparkhvd
