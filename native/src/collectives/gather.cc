// Gather to a root, with unequal first dimensions. Between islands the bytes move directly from tensor to result,
// inside the root's island through the slots of shared memory.
#include <numeric>

#include "collectives/collectives.h"
#include "collectives/spec.h"

namespace sparkhvd {

Task gather(Context& context) {
  context.algorithm = "gather";
  const Team& team = context.team;
  Operation& operation = context.operation;
  const Descriptor& descriptor = operation.descriptor;
  const bool is_root = team.self() == descriptor.root;
  const std::size_t row_bytes =
      row_elements(descriptor.shapes.at(0), descriptor.dtype) * element_size(descriptor.dtype);
  operation.rows = context.agreed.rows;
  std::vector<Range> blocks;  // by member: range in the result
  std::size_t total = 0;
  for (const std::int64_t rows : operation.rows) {
    blocks.push_back({total, static_cast<std::size_t>(rows) * row_bytes});
    total += blocks.back().size;
  }
  ResultMemory memory;
  co_await make_result(context, std::vector(1, is_root ? total : 0), memory);

  const auto& island = team.islands()[team.island_index_of(descriptor.root)];
  const auto is_mate = [&](Rank rank) { return std::ranges::count(island, rank) > 0; };
  const Pieces& own = operation.pieces;
  Transfers transfers(context.communicator);
  if (is_root) {
    own.read(0, memory.part(blocks[team.index()]));
    for (std::size_t member = 0; member < team.size(); ++member) {
      const Rank rank = team.ranks()[member];
      if (!is_mate(rank)) transfers.receive(rank, memory.part(blocks[member]));
    }
  } else if (!is_mate(team.self())) {
    own.for_range(0, own.bytes(), [&](const Pieces::Part& part) {
      transfers.send(descriptor.root, {part.input, part.bytes});
    });
  }
  if (is_mate(team.self())) {
    Delivery delivery{.taker = descriptor.root};
    for (const Rank rank : island) delivery.bytes.push_back(blocks[team.index_in(rank)].size);
    delivery.read = [&](std::size_t begin, std::span<std::byte> target) {
      own.read(begin, target);
    };
    delivery.take = [&](std::size_t local, std::size_t begin, std::span<const std::byte> source) {
      const Range block = blocks[team.index_in(island[local])];
      memory.pieces().write(block.begin + begin, source);
    };
    co_await deliver_in_island(context, std::move(delivery));
  }
  co_await transfers.all_received();
  co_await transfers.all_sent();
}

namespace {

std::int64_t rows_of_gather(const Descriptor& descriptor, const Execute& order, std::size_t,
                            std::span<const Rank> members, std::size_t member) {
  if (members[member] != descriptor.root) return 0;
  return std::reduce(order.rows.begin(), order.rows.end());
}

}  // namespace

extern const CollectiveSpec kGatherSpec = {.collective = Collective::kGather,
                                           .min_tensors = 1,
                                           .max_tensors = 1,
                                           .has_root = true,
                                           .result = Result::kAgreed,
                                           .is_uneven = true,
                                           .check = take_no_numbers,
                                           .write_rows = write_first_dimensions,
                                           .count_rows = count_first_dimensions,
                                           .are_rows_possible = are_first_dimensions_possible,
                                           .rows_of_result = rows_of_gather,
                                           .run = gather};

}  // namespace sparkhvd
