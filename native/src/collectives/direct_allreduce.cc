// Allreduce over connections alone, for a few ranks that share no memory: rank r owns part r of
// each segment, receives that part from everyone, adds in rank order, and sends the result to
// everyone. A ring's bytes in two steps; sent from, and received into, the tensors themselves.
#include <algorithm>
#include <array>
#include <memory>

#include "collectives/collectives.h"

namespace sparkhvd {
namespace {

// Of one rank's part: large enough for a connection's bandwidth, small enough to overlap and to
// stay in cache.
constexpr std::size_t kPartBytes = 256 << 10;

}  // namespace

Task direct_allreduce(Context& context) {
  Communicator& communicator = context.communicator;
  const Pieces& pieces = context.operation.pieces;
  const DType dtype = context.operation.descriptor.dtype;
  const ReduceOp op = kernel_op(context);
  const Scaling scaling = scaling_of(context);
  const std::size_t element = element_size(dtype);
  const std::size_t size = communicator.size();
  const auto me = static_cast<std::size_t>(index_of(communicator.rank()));
  const std::size_t segment_bytes = kPartBytes * size;
  const std::size_t segments = (pieces.bytes() + segment_bytes - 1) / segment_bytes;

  const auto part = [&](std::size_t segment, std::size_t owner) -> Range {
    const std::size_t begin = segment * segment_bytes;
    const std::size_t bytes = std::min(segment_bytes, pieces.bytes() - begin);
    const Range elements = part_of(bytes / element, size, owner, element);
    return {begin + elements.begin * element, elements.size * element};
  };
  // Incoming parts of two segments: one arrives while the other is reduced.
  const auto incoming = std::make_unique_for_overwrite<std::byte[]>(2 * size * kPartBytes);
  const auto place = [&](std::size_t segment, std::size_t from) {
    return incoming.get() + ((segment % 2) * size + from) * kPartBytes;
  };
  std::vector<const void*> sources(size);
  std::array<Transfers, 2> parts{Transfers(communicator, context.operation.process_set),
                                 Transfers(communicator, context.operation.process_set)};
  Transfers results(communicator, context.operation.process_set);

  // Every rank posts and sends in the same order, so a connection needs no tags: parts 0, parts 1,
  // results 0, parts 2, results 1, ...
  for (std::size_t step = 0; step < segments + 1; ++step) {
    if (step < segments) {
      Transfers& transfers = parts[step % 2];
      transfers = Transfers(communicator, context.operation.process_set);
      const Range own = part(step, me);
      for (std::size_t peer = 0; peer < size; ++peer) {
        if (peer == me) continue;
        const auto rank = Rank{static_cast<std::int32_t>(peer)};
        transfers.receive(rank, {place(step, peer), own.size});
        const Range theirs = part(step, peer);
        pieces.for_range(theirs.begin, theirs.size, [&](const Pieces::Part& piece) {
          transfers.send(rank, {piece.input, piece.bytes});
        });
      }
    }
    if (step == 0) continue;
    const std::size_t segment = step - 1;
    const Range own = part(segment, me);
    co_await parts[segment % 2].all_received();
    pieces.for_range(own.begin, own.size, [&](const Pieces::Part& piece) {
      for (std::size_t peer = 0; peer < size; ++peer) {
        sources[peer] = peer == me ? piece.input : place(segment, peer) + piece.offset;
      }
      context.kernels.reduce(dtype, op, piece.output, sources, piece.bytes / element, scaling);
    });
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      const auto rank = Rank{static_cast<std::int32_t>(peer)};
      pieces.for_range(own.begin, own.size, [&](const Pieces::Part& piece) {
        results.send(rank, {piece.output, piece.bytes});
      });
      // In place this overwrites input that is on its way to the owner: its result comes only after
      // it has received all of that input.
      const Range theirs = part(segment, peer);
      pieces.for_range(theirs.begin, theirs.size, [&](const Pieces::Part& piece) {
        results.receive(rank, {piece.output, piece.bytes});
      });
    }
    // The next parts use the memory and the transfers of these.
    co_await parts[segment % 2].all_sent();
  }
  co_await results.all_received();
  co_await results.all_sent();
}

}  // namespace sparkhvd
