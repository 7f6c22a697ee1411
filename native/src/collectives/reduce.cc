// Reduce to a root. Every rank adds up an equal part of all elements, as in reducescatter, and sends it to the root. If
// the tensors are small and no two ranks share memory, every rank sends its tensors to the root, which adds them up.
#include <memory>

#include "collectives/collectives.h"
#include "collectives/spec.h"

namespace sparkhvd {
namespace {

// Up to this size the time of a message is its latency, and its bytes do not matter.
constexpr std::size_t kSentWholeBytes = 16 << 10;

Task send_whole(Context& context) {
  const Team& team = context.team;
  const Operation& operation = context.operation;
  const std::size_t bytes = operation.pieces.bytes();
  Transfers transfers(context.communicator);
  if (team.self() != operation.descriptor.root) {
    operation.pieces.for_range(0, bytes, [&](const Pieces::Part& part) {
      transfers.send(operation.descriptor.root, {part.input, part.bytes});
    });
    co_await transfers.all_sent();
    co_return;
  }
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes * team.size());
  for (std::size_t i = 0; i < team.size(); ++i) {
    if (i != team.index()) {
      transfers.receive(team.ranks()[i], {memory.get() + i * bytes, bytes});
    }
  }
  co_await transfers.all_received();
  std::vector<const void*> sources(team.size());
  const DType dtype = operation.descriptor.dtype;
  std::size_t begin = 0;
  operation.pieces.for_range(0, bytes, [&](const Pieces::Part& part) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sources[i] = i == team.index() ? part.input : memory.get() + i * bytes + begin;
    }
    context.kernels.reduce(dtype, kernel_op(context), part.output, sources,
                           part.bytes / element_size(dtype), scaling_of(context));
    begin += part.bytes;
  });
}

}  // namespace

Task reduce(Context& context) {
  context.algorithm = "reduce";
  const Team& team = context.team;
  const Operation& operation = context.operation;
  const Pieces& pieces = operation.pieces;
  const Rank root = operation.descriptor.root;
  if (pieces.bytes() == 0) co_return;
  if (team.is_all_alone() && team.size() > 1 && pieces.bytes() <= kSentWholeBytes) {
    co_await send_whole(context);
    co_return;
  }
  Descriptor flat = operation.descriptor;
  flat.shapes = {{static_cast<std::int64_t>(pieces.bytes() / element_size(flat.dtype))}};
  const auto part_of_member = [&](std::size_t member) {
    const RangeList rows = rows_of(flat, team.size(), member);
    Range part{0, rows.size()};
    rows.for_range(0, rows.size(),
                   [&](std::size_t place, std::size_t, std::size_t) { part.begin = place; });
    return part;
  };
  const Range own = part_of_member(team.index());
  // The root adds up its part in its result, the other ranks in temporary memory.
  std::unique_ptr<std::byte[]> memory;
  Pieces result;
  if (team.self() == root) {
    pieces.for_range(own.begin, own.size, [&](const Pieces::Part& part) {
      result.add(part.output, part.output, part.bytes);
    });
  } else {
    memory = std::make_unique_for_overwrite<std::byte[]>(own.size);
    result.add(memory.get(), memory.get(), own.size);
  }
  co_await divide_and_reduce(context, flat, result);

  Transfers transfers(context.communicator);
  const auto& island = team.islands()[team.island_index_of(root)];
  for (std::size_t member = 0; member < team.size(); ++member) {
    const Rank rank = team.ranks()[member];
    if (std::ranges::count(island, rank) > 0) continue;
    if (rank == team.self()) transfers.send(root, {memory.get(), own.size});
    if (team.self() != root) continue;
    const Range part = part_of_member(member);
    pieces.for_range(part.begin, part.size, [&](const Pieces::Part& piece) {
      transfers.receive(rank, {piece.output, piece.bytes});
    });
  }
  if (team.island_index() == team.island_index_of(root)) {
    Delivery delivery{.taker = root};
    for (const Rank rank : island) {
      delivery.bytes.push_back(part_of_member(team.index_in(rank)).size);
    }
    delivery.read = [&](std::size_t begin, std::span<std::byte> target) {
      result.read(begin, target);
    };
    delivery.take = [&](std::size_t local, std::size_t begin, std::span<const std::byte> source) {
      pieces.write(part_of_member(team.index_in(island[local])).begin + begin, source);
    };
    co_await deliver_in_island(context, std::move(delivery));
  }
  co_await transfers.all_received();
  co_await transfers.all_sent();
}

extern const CollectiveSpec kReduceSpec = {.collective = Collective::kReduce,
                                           .min_tensors = 1,
                                           .max_tensors = UINT32_MAX,
                                           .reduces = true,
                                           .has_root = true,
                                           .result = Result::kOfRoot,
                                           .check = take_digest,
                                           .run = reduce};

}  // namespace sparkhvd
