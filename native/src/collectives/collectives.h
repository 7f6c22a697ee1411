// Every collective, one declaration each; one algorithm per file. Each is called by all ranks of
// the communicator in the same order and gives every rank the same bits.
//
// An operation's memory belongs to the task until it ends; the engine destroys a task that must
// stop early, after it has made the links forget the memory that the task lent them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "communicator.h"
#include "kernels/kernels.h"
#include "message.h"
#include "operation.h"
#include "task.h"

namespace sparkhvd {

/// What a running collective works with.
struct Context {
  Communicator& communicator;
  const Kernels& kernels;
  Operation& operation;
  Execute agreed;
  Schedule schedule;
};

/// Runs the operation that the ranks have agreed on; picks the algorithm.
Task run_collective(Context& context);

// allreduce: which one depends on where the ranks are.
Task allreduce(Context& context);
/// All ranks share memory. Traffic per rank with N ranks: 2S(N-1)/N copied, S + S/N reduced.
Task shared_allreduce(Context& context);
/// No two ranks share memory, few ranks: every rank reduces one part, straight from and to the
/// tensors. 2S(N-1)/N bytes sent per rank in 2 steps.
Task direct_allreduce(Context& context);
/// Several islands: reduce inside, exchange between, share inside.
Task hierarchical_allreduce(Context& context);

Task allgather(Context& context);
Task broadcast(Context& context);

/// Partial results of `count` elements, in the accumulation type, and where the result goes.
struct CrossExchange {
  std::byte* partial;  // overwritten
  std::byte* result;
  std::size_t count;
};

/// Adds up the partial results of the ranks with this rank's local index, one per island.
Task cross_allreduce(Context& context, CrossExchange exchange);

/// A range of the result that one rank of the island gives to the others.
struct Contribution {
  std::size_t local;  // index of the giver in the island
  std::size_t begin;
  std::size_t bytes;
};

/// Passes ranges of `result` from the ranks that have them to all ranks of the island.
Task share_in_island(Context& context, std::span<std::byte> result,
                     std::span<const Contribution> contributions);

/// Scaling and operation as the kernels want them: Average is Sum with a divisor.
ReduceOp kernel_op(const Context& context) noexcept;
Scaling scaling_of(const Context& context) noexcept;

/// A range of elements or bytes.
struct Range {
  std::size_t begin = 0;
  std::size_t size = 0;
};

/// Part `index` of `count` elements cut in `parts` nearly equal ranges on cache-line boundaries.
Range part_of(std::size_t count, std::size_t parts, std::size_t index,
              std::size_t element_bytes) noexcept;

}  // namespace sparkhvd
