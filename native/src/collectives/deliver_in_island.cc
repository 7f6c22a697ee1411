// A step of reduce and gather inside an island: one rank reads the parts of the other ranks from their slots.
#include <algorithm>

#include "collectives/collectives.h"

namespace sparkhvd {

Task deliver_in_island(Context& context, Delivery delivery) {
  const Communicator& communicator = context.communicator;
  const Team& team = context.team;
  const std::size_t chunk_bytes = communicator.knobs().chunk_bytes;
  const bool takes = team.self() == delivery.taker;
  const auto size_of = [&](std::size_t local, std::uint64_t chunk) {
    const std::size_t bytes = delivery.bytes[local];
    const std::size_t begin = chunk * chunk_bytes;
    return begin < bytes ? std::min(chunk_bytes, bytes - begin) : 0;
  };
  Passage passage;
  for (std::size_t local = 0; local < team.local_size(); ++local) {
    if (team.island()[local] == delivery.taker) continue;
    passage.chunks =
        std::max(passage.chunks, (delivery.bytes[local] + chunk_bytes - 1) / chunk_bytes);
  }
  passage.fill = [&](std::uint64_t chunk, std::byte* slot) {
    const std::size_t size = takes ? 0 : size_of(team.local_index(), chunk);
    if (size > 0) delivery.read(chunk * chunk_bytes, {slot, size});
  };
  passage.take = [&](std::uint64_t chunk, std::uint64_t number) {
    for (std::size_t local = 0; takes && local < team.local_size(); ++local) {
      const std::size_t size = size_of(local, chunk);
      if (local == team.local_index() || size == 0) continue;
      const std::byte* slot = communicator.slot(team.island()[local], number);
      delivery.take(local, chunk * chunk_bytes, {slot, size});
    }
  };
  co_await pass_through_slots(context, std::move(passage));
}

}  // namespace sparkhvd
