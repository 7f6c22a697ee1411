// Broadcast: the root sends one part to each rank of every other island; the ranks of an island
// then give each other their parts through shared memory. Inside the root's island the root gives
// everything.
#include <cstring>
#include <vector>

#include "collectives/collectives.h"

namespace sparkhvd {

Task broadcast(Context& context) {
  context.algorithm = "broadcast";
  const Team& team = context.team;
  const Pieces& pieces = context.operation.pieces;
  const std::size_t total = pieces.bytes();
  if (total == 0) co_return;
  const Rank root = context.operation.descriptor.root;
  std::span<std::byte> result;
  pieces.for_range(0, total, [&](const Pieces::Part& part) {
    result = {part.output, part.bytes};  // a broadcast has one tensor
    if (team.self() == root && part.input != part.output) {
      std::memcpy(part.output, part.input, part.bytes);
    }
  });
  Transfers transfers(context.communicator);
  std::vector<Contribution> contributions;
  const auto& islands = team.islands();
  for (std::size_t i = 0; i < islands.size(); ++i) {
    const auto& island = islands[i];
    const auto place = std::ranges::find(island, root);
    if (place != island.end()) {
      if (i == team.island_index()) {
        contributions.push_back({static_cast<std::size_t>(place - island.begin()), 0, total});
      }
      continue;
    }
    for (std::size_t local = 0; local < island.size(); ++local) {
      const Range part = part_of(total, island.size(), local, 1);
      if (i == team.island_index()) {
        contributions.push_back({local, part.begin, part.size});
        if (local == team.local_index()) {
          transfers.receive(root, result.subspan(part.begin, part.size));
        }
      } else if (team.self() == root) {
        transfers.send(island[local], result.subspan(part.begin, part.size));
      }
    }
  }
  co_await transfers.all_received();
  Pieces whole;
  whole.add(result.data(), result.data(), result.size());
  co_await share_in_island(context, whole, contributions);
  co_await transfers.all_sent();
}

}  // namespace sparkhvd
