#include "collectives/collectives.h"

#include <algorithm>

#include "error.h"

namespace sparkhvd {

Task run_collective(Context& context) {
  switch (context.operation.descriptor.collective) {
    case Collective::kAllreduce:
      return allreduce(context);
    case Collective::kAllgather:
      return allgather(context);
    case Collective::kBroadcast:
      return broadcast(context);
    case Collective::kBarrier:
    case Collective::kAlltoall:
    case Collective::kReducescatter:
    case Collective::kJoin:
      break;
  }
  throw Error(SPARKHVD_INTERNAL, "a collective without an implementation was agreed on.");
}

Task allreduce(Context& context) {
  const Communicator& communicator = context.communicator;
  if (context.operation.pieces.bytes() == 0) return {};
  if (communicator.size() > 1 && communicator.islands().size() == 1) {
    return shared_allreduce(context);
  }
  // Beyond this many parts the messages get short and a ring's order is better (see
  // cross_allreduce).
  constexpr std::size_t kMaxDirect = 16;
  if (communicator.islands().size() == communicator.size() && communicator.size() <= kMaxDirect) {
    return direct_allreduce(context);
  }
  return hierarchical_allreduce(context);
}

ReduceOp kernel_op(const Context& context) noexcept {
  const ReduceOp op = context.operation.descriptor.reduce_op;
  return op == ReduceOp::kAverage ? ReduceOp::kSum : op;
}

Scaling scaling_of(const Context& context) noexcept {
  const Descriptor& descriptor = context.operation.descriptor;
  Scaling scaling;
  scaling.prescale = descriptor.prescale;
  scaling.postscale = descriptor.postscale;
  if (descriptor.reduce_op == ReduceOp::kAverage) {
    scaling.divisor = static_cast<int>(context.communicator.size());
  }
  return scaling;
}

Range part_of(std::size_t count, std::size_t parts, std::size_t index,
              std::size_t element_bytes) noexcept {
  const std::size_t line = 64 / element_bytes;
  const std::size_t step = ((count + parts - 1) / parts + line - 1) / line * line;
  const std::size_t begin = std::min(count, index * step);
  return {begin, std::min(count - begin, step)};
}

}  // namespace sparkhvd
