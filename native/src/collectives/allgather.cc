// Allgather with unequal first dimensions: every block goes once over the network to one rank of
// each other island, and from there through shared memory to the rest.
#include <cstring>
#include <memory>

#include "collectives/collectives.h"
#include "error.h"

namespace sparkhvd {

Task allgather(Context& context) {
  Communicator& communicator = context.communicator;
  Operation& operation = context.operation;
  const auto& shape = operation.descriptor.shapes.at(0);
  const auto& rows = context.agreed.rows;
  const std::span<const std::int64_t> row_shape =
      shape.empty() ? std::span<const std::int64_t>() : std::span(shape).subspan(1);
  const std::size_t row_bytes = *count_elements(row_shape, operation.descriptor.dtype) *
                                element_size(operation.descriptor.dtype);
  std::vector<Range> blocks;
  std::size_t total = 0;
  for (const std::int64_t count : rows) {
    blocks.push_back({total, static_cast<std::size_t>(count) * row_bytes});
    total += blocks.back().size;
  }
  operation.output = std::make_unique_for_overwrite<std::byte[]>(total);
  operation.output_bytes = total;
  operation.rows = rows;
  const std::span<std::byte> result(operation.output.get(), total);
  const auto block = [&](Rank rank) { return blocks[static_cast<std::size_t>(index_of(rank))]; };
  const auto bytes = [&](Rank rank) { return result.subspan(block(rank).begin, block(rank).size); };
  operation.pieces.read(0, bytes(communicator.rank()));

  // Between islands: block of local rank i goes to local rank i mod size of the other island.
  Transfers transfers(communicator, operation.process_set);
  std::vector<Contribution> contributions;
  const auto& islands = communicator.islands();
  const std::size_t local_size = communicator.local_size();
  for (std::size_t i = 0; i < islands.size(); ++i) {
    for (std::size_t from = 0; from < islands[i].size(); ++from) {
      const Rank giver = islands[i][from];
      contributions.push_back({from % local_size, block(giver).begin, block(giver).size});
      if (i != communicator.island_index() && from % local_size == communicator.local_index()) {
        transfers.receive(giver, bytes(giver));
      }
    }
    if (i != communicator.island_index()) {
      transfers.send(islands[i][communicator.local_index() % islands[i].size()],
                     bytes(communicator.rank()));
    }
  }
  co_await transfers.all_received();
  co_await share_in_island(context, result, contributions);
  co_await transfers.all_sent();
}

}  // namespace sparkhvd
