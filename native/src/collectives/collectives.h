// Every collective, one declaration each; one algorithm per file. Each is called by all ranks of
// the team in the same order and gives every rank the same bits.
//
// An operation's memory belongs to the task until it ends. The engine destroys a task that must
// stop early, after the links have released the memory that the task lent them.
//
// Chunks of shared memory are numbered since the start, equally on all ranks of an island. An operation
// that uses chunks advances the number, and has published every stage for all of them when it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/ranges.h"
#include "communicator.h"
#include "kernels/kernels.h"
#include "message.h"
#include "operation.h"
#include "task.h"

namespace sparkhvd {

/// Surroundings of a running collective.
struct Context {
  Communicator& communicator;
  const Kernels& kernels;
  Operation& operation;
  Execute agreed;
  /// Ranks that take part: the process set, less the ranks that have joined. This rank is one of them.
  Team team;
  Schedule schedule = {};
  /// Name of the chosen algorithm, for counters and the timeline.
  const char* algorithm = "";
  /// share_memory: the new memory.
  std::shared_ptr<Segment> segment = {};
  /// Warning for the user, on stderr.
  std::vector<std::string> warnings = {};
};

/// allreduce: the algorithm depends on the places of the ranks and the tensors. Adasum needs a team
/// whose size is a power of two.
Task allreduce(Context& context);
/// The numbers of chunks by which an allreduce advances each island that has memory, also the ranks
/// of it that have joined: these advance, and publish every stage, when its turn comes.
std::uint64_t chunks_of(const Communicator& communicator, const Team& team,
                        const Descriptor& descriptor, const Execute& agreed);

/// One rank: scales.
Task lone_allreduce(Context& context);
/// All ranks share memory. Traffic per rank with N ranks: 2S(N-1)/N copied, S + S/N reduced.
Task shared_allreduce(Context& context);
std::uint64_t shared_allreduce_chunks(const Communicator& communicator,
                                      const Descriptor& descriptor);
/// All ranks share memory and have copied their tensors there: every rank reduces everything without
/// waiting.
Task mailbox_allreduce(Context& context);
/// All ranks share the memory of the tensors, which are reduced in place. The first rank to arrive does
/// more of the work. 2S moved per rank.
Task registered_allreduce(Context& context);
/// No two ranks share memory, small tensors: every rank sends everything to every other, in one step.
Task symmetric_allreduce(Context& context);
/// Several islands: reduce inside, exchange between, share inside.
Task island_allreduce(Context& context);
std::uint64_t island_allreduce_chunks(const Communicator& communicator, const Team& team,
                                      const Descriptor& descriptor, const Execute& agreed);
/// arXiv:2006.02924: recursive doubling, with whole vectors.
Task adasum_allreduce(Context& context);

Task allgather(Context& context);
/// The inverse of reducescatter, in place.
Task allgather_into(Context& context);
Task broadcast(Context& context);
Task alltoall(Context& context);
Task reducescatter(Context& context);
/// The sum of every rank's tensors on the root.
Task reduce(Context& context);
/// Every rank's tensor to the root, one after the other along the first dimension.
Task gather(Context& context);
/// The root's rows to their ranks.
Task scatter(Context& context);

/// Every rank of the team allocates `bytes` of new memory and maps its island's pieces: `context.segment`. If a
/// rank of the island fails, it has only this rank's own piece (or none, if this rank failed). In the end all
/// ranks of the team have answered, and `context.team` has islands of one rank where memory is not shared. With
/// one piece per island only its first rank allocates memory, and no rank has a segment if one could not map it.
Task share_memory(Context& context, std::size_t bytes,
                  Segment::Kind kind = Segment::Kind::kPieceEach);

// Steps of collectives.

/// Reduces this rank's rows, by `descriptor`, of the operation's tensors into `results`. Needs at least one byte.
Task divide_and_reduce(Context& context, const Descriptor& descriptor, const Pieces& results);

/// Sends every rank's blocks, at their positions in its `whole`, to all others. `blocks_of(member, use)` calls
/// `use(Range)` for each block of a member, in one order on all ranks.
using UseRange = std::function<void(Range)>;
using BlocksOf = std::function<void(std::size_t member, const UseRange& use)>;
Task gather_blocks(Context& context, const Pieces& whole, BlocksOf blocks_of);

/// Passes the others' parts to one rank of the island: `parts` by index in the island. Each rank reads its own by
/// `read(begin, target)`, and the receiver gets all of them by `take(local, begin, source)`.
struct Delivery {
  Rank taker;
  std::vector<std::size_t> bytes = {};
  std::function<void(std::size_t begin, std::span<std::byte> target)> read = {};
  std::function<void(std::size_t local, std::size_t begin, std::span<const std::byte> source)>
      take = {};
};
Task deliver_in_island(Context& context, Delivery delivery);

/// Memory for a negotiated result, tensor after tensor: the caller's if given, else the operation's own.
class ResultMemory {
 public:
  ResultMemory() = default;
  /// `bytes` by tensor. Throws bad_alloc.
  ResultMemory(Operation& operation, std::span<const std::size_t> bytes);
  const Pieces& pieces() const noexcept { return pieces_; }
  /// A range inside of one tensor.
  std::span<std::byte> part(Range range) const;

 private:
  Pieces pieces_;
};

/// Allocates it; if the order marks it as large, together with the other ranks, and OperationFailed names the ranks
/// without memory for it.
Task make_result(Context& context, std::vector<std::size_t> bytes, ResultMemory& memory);

/// A range of the result that one rank of the island sends to the others.
struct Contribution {
  std::size_t local;  // index of the sender in the island
  std::size_t begin;
  std::size_t bytes;
};

/// Passes ranges of `result`, in place, from their owners to all ranks of the island.
Task share_in_island(Context& context, const Pieces& result,
                     std::span<const Contribution> contributions);

/// Work of each rank of the island on each chunk of a passage.
struct Passage {
  std::uint64_t chunks = 0;  // equal on all ranks of the island
  /// Copies the others' data into this rank's slot.
  std::function<void(std::uint64_t chunk, std::byte* slot)> fill;
  /// Copies this rank's data from the others' slots, `slot(rank, number)`.
  std::function<void(std::uint64_t chunk, std::uint64_t number)> take;
};

/// Passes chunks through the slots of the island: one is filled while the previous one is read.
Task pass_through_slots(Context& context, Passage passage);

/// Holds when all ranks have read the previous content of the slots of chunk `number`, also the ranks that
/// take no part.
inline Communicator::Reached slot_is_free(const Communicator& communicator, std::uint64_t number) {
  const std::uint64_t slots = communicator.num_slots();
  return communicator.reached(communicator.team(), Stage::kCopiedOut,
                              number + 1 > slots ? number + 1 - slots : 0);
}

/// Every stage of everything before the next chunk is done.
void publish_all(Communicator& communicator);

/// Scaling and operation for the kernels: Average is Sum with a divisor.
ReduceOp kernel_op(const Context& context) noexcept;
Scaling scaling_of(const Context& context) noexcept;

/// Bytes of all tensors of a descriptor.
std::size_t total_bytes(const Descriptor& descriptor);
/// The bytes of all tensors that one of the members gets when first dimensions are divided.
RangeList rows_of(const Descriptor& descriptor, std::size_t members, std::size_t member);

}  // namespace sparkhvd
