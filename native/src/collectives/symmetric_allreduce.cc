// Allreduce of small tensors between ranks without shared memory: every rank sends its tensors to all other ranks, and
// adds up all tensors itself. This takes one step instead of two; for small tensors the additional bytes do not matter.
#include <memory>

#include "collectives/collectives.h"

namespace sparkhvd {

Task symmetric_allreduce(Context& context) {
  context.algorithm = "symmetric";
  const Pieces& pieces = context.operation.pieces;
  const DType dtype = context.operation.descriptor.dtype;
  const Team& team = context.team;
  const std::size_t bytes = pieces.bytes();
  // Sends a copy of the input, because an in-place result may overwrite the input before all ranks have received it.
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes * team.size());
  const auto place = [&](std::size_t index) { return memory.get() + index * bytes; };
  pieces.read(0, {place(team.index()), bytes});
  Transfers transfers(context.communicator);
  for (std::size_t i = 0; i < team.size(); ++i) {
    if (i == team.index()) continue;
    transfers.send(team.ranks()[i], {place(team.index()), bytes});
    transfers.receive(team.ranks()[i], {place(i), bytes});
  }
  co_await transfers.all_received();
  std::vector<const void*> sources(team.size());
  std::size_t begin = 0;
  pieces.for_range(0, bytes, [&](const Pieces::Part& part) {
    for (std::size_t i = 0; i < sources.size(); ++i) sources[i] = place(i) + begin;
    context.kernels.reduce(dtype, kernel_op(context), part.output, sources,
                           part.bytes / element_size(dtype), scaling_of(context));
    begin += part.bytes;
  });
  co_await transfers.all_sent();
}

}  // namespace sparkhvd
