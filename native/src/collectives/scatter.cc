// Scatter from a root, with any number of rows per rank. Between islands the bytes move directly from tensor to result,
// inside the root's island through the root's slots.
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "error.h"

namespace sparkhvd {

Task scatter(Context& context) {
  context.algorithm = "scatter";
  const Team& team = context.team;
  Operation& operation = context.operation;
  const Descriptor& descriptor = operation.descriptor;
  const Rank root = descriptor.root;
  const bool is_root = team.self() == root;
  const std::size_t row_bytes =
      row_elements(descriptor.shapes.at(0), descriptor.dtype) * element_size(descriptor.dtype);
  std::vector<Range> blocks;  // by member: range in the root's tensor
  std::size_t total = 0;
  for (const std::int64_t rows : context.agreed.rows) {
    blocks.push_back({total, static_cast<std::size_t>(rows) * row_bytes});
    total += blocks.back().size;
  }
  const Range own = blocks[team.index()];
  operation.rows = {context.agreed.rows[team.index()]};
  ResultMemory memory;
  co_await make_result(context, std::vector(1, own.size), memory);
  const std::span<std::byte> result = memory.part({0, own.size});

  const auto& island = team.islands()[team.island_index_of(root)];
  const auto is_mate = [&](Rank rank) { return std::ranges::count(island, rank) > 0; };
  Transfers transfers(context.communicator);
  if (is_root) {
    operation.pieces.read(own.begin, result);
    for (std::size_t i = 1; i < team.size(); ++i) {
      const std::size_t member = (team.index() + i) % team.size();
      if (is_mate(team.ranks()[member])) continue;
      operation.pieces.for_range(blocks[member].begin, blocks[member].size,
                                 [&](const Pieces::Part& part) {
                                   transfers.send(team.ranks()[member], {part.input, part.bytes});
                                 });
    }
  } else if (!is_mate(team.self())) {
    transfers.receive(root, result);
  }
  if (is_mate(team.self())) {
    RangeList given;  // ranges of the root's tensor for its local_peers
    std::size_t begin = 0;
    for (const Rank rank : island) {
      if (rank == team.self()) begin = given.size();
      if (rank != root) given.add(blocks[team.index_in(rank)]);
    }
    const std::size_t chunk_bytes = context.communicator.knobs().chunk_bytes;
    Passage passage;
    passage.chunks = (given.size() + chunk_bytes - 1) / chunk_bytes;
    passage.fill = [&](std::uint64_t chunk, std::byte* slot) {
      if (!is_root) return;
      given.for_range(chunk * chunk_bytes, chunk_bytes,
                      [&](std::size_t place, std::size_t offset, std::size_t bytes) {
                        operation.pieces.read(place, {slot + offset, bytes});
                      });
    };
    passage.take = [&](std::uint64_t chunk, std::uint64_t number) {
      const std::size_t chunk_begin = chunk * chunk_bytes;
      const std::size_t from = std::max(chunk_begin, begin);
      const std::size_t to = std::min(chunk_begin + chunk_bytes, begin + own.size);
      if (is_root || from >= to) return;
      std::memcpy(result.data() + (from - begin),
                  context.communicator.slot(root, number) + (from - chunk_begin), to - from);
    };
    co_await pass_through_slots(context, std::move(passage));
  }
  co_await transfers.all_received();
  co_await transfers.all_sent();
}

namespace {

void check_splits_of_scatter(const Submitted& submitted) {
  const Descriptor& descriptor = submitted.descriptor;
  if (descriptor.root == submitted.self) return take_splits(submitted);
  const auto& shape = descriptor.shapes[0];
  if (shape.empty() || shape[0] != 0) {
    submitted.refuse("only the root has rows to give; the others submit a tensor of 0 rows.");
  }
  take_no_numbers(submitted);
}

/// Writes the root's splits into the order. Only the root passes splits.
void write_splits_of_root(std::span<const Descriptor* const> by_member, Execute& order) {
  for (const Descriptor* descriptor : by_member) {
    if (descriptor->numbers.empty()) continue;
    const bool is_sound = std::ranges::all_of(
        descriptor->numbers, [&](auto rows) { return is_possible(*descriptor, 0, rows); });
    if (!order.rows.empty() || descriptor->numbers.size() != by_member.size() || !is_sound) {
      throw nonsense("a scatter with invalid splits");
    }
    order.rows = descriptor->numbers;
  }
  if (order.rows.empty()) throw nonsense("a scatter without splits");
}

std::size_t count_rows_of_scatter(const Descriptor&, std::size_t members) { return members; }

bool are_rows_of_scatter_possible(const Received& received) {
  const auto& [descriptor, order, team] = received;
  if (order.rows.size() != team.size()) return false;
  if (!descriptor.numbers.empty() && order.rows != descriptor.numbers) return false;
  return std::ranges::all_of(order.rows,
                             [&](auto rows) { return is_possible(descriptor, 0, rows); });
}

std::int64_t rows_of_scatter(const Descriptor&, const Execute& order, std::size_t,
                             std::span<const Rank>, std::size_t member) {
  return order.rows[member];
}

}  // namespace

extern const CollectiveSpec kScatterSpec = {.collective = Collective::kScatter,
                                            .min_tensors = 1,
                                            .max_tensors = 1,
                                            .has_root = true,
                                            .result = Result::kAgreed,
                                            .divides_rows = true,
                                            .is_uneven = true,
                                            .same_numbers = nullptr,
                                            .check = check_splits_of_scatter,
                                            .write_rows = write_splits_of_root,
                                            .count_rows = count_rows_of_scatter,
                                            .are_rows_possible = are_rows_of_scatter_possible,
                                            .rows_of_result = rows_of_scatter,
                                            .run = scatter};

}  // namespace sparkhvd
