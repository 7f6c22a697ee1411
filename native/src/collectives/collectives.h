// Every collective, one declaration each; one algorithm per file. Each is called by all ranks of
// the team in the same order and gives every rank the same bits.
//
// An operation's memory belongs to the task until it ends; the engine destroys a task that must
// stop early, after it has made the links forget the memory that the task lent them.
//
// Chunks of shared memory are numbered since the start, equally on all ranks of an island. Whoever
// uses some advances the number, and has published every stage for all of them when it ends.
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
  /// Name of the algorithm that was picked, for counters and the timeline.
  const char* algorithm = "";
  /// share_memory: what it made.
  std::shared_ptr<Segment> segment = {};
  /// Warning for the user, on stderr.
  std::vector<std::string> warnings = {};
};

/// allreduce: which algorithm depends on where the ranks and the tensors are. Adasum needs a team
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
/// All ranks share memory and have copied their tensors there: everyone reduces everything, and
/// nobody waits.
Task mailbox_allreduce(Context& context);
/// All ranks share the memory of the tensors, which are reduced in place. Whoever comes first takes
/// more of the work. 2S moved per rank.
Task registered_allreduce(Context& context);
/// No two ranks share memory, small tensors: everyone sends everything to everyone, in one step.
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
/// The root's rows to the ranks that they are for.
Task scatter(Context& context);

/// Every rank of the team brings `bytes` of new memory and maps what its island brought:
/// `context.segment`, with this rank's own piece only where some rank of the island could not (and
/// without that, where this one could not). In the end all ranks of the team have answered, and
/// `context.team` has islands of one rank where memory is not shared. Of the kind with one piece only
/// the first rank of each island brings memory, and no rank has a segment if one of them could not map it.
Task share_memory(Context& context, std::size_t bytes,
                  Segment::Kind kind = Segment::Kind::kPieceEach);

// Steps of collectives.

/// Reduces the operation's tensors, of which this rank gets the rows that are its own by `descriptor`, into
/// `results`. Not for no bytes.
Task divide_and_reduce(Context& context, const Descriptor& descriptor, const Pieces& results);

/// Gives every rank's blocks, which are in their places in its `whole`, to all others. `blocks_of(member, use)` calls
/// `use(Range)` for each block of a member, in one order on all ranks.
using UseRange = std::function<void(Range)>;
using BlocksOf = std::function<void(std::size_t member, const UseRange& use)>;
Task gather_blocks(Context& context, const Pieces& whole, BlocksOf blocks_of);

/// Passes to one rank of the island what the others have for it: `parts` by index in the island, each rank's
/// own read by `read(begin, target)`, and all of them given to `take(local, begin, source)` on the taker.
struct Delivery {
  Rank taker;
  std::vector<std::size_t> bytes = {};
  std::function<void(std::size_t begin, std::span<std::byte> target)> read = {};
  std::function<void(std::size_t local, std::size_t begin, std::span<const std::byte> source)>
      take = {};
};
Task deliver_in_island(Context& context, Delivery delivery);

/// Memory for an agreed result, tensor after tensor: the caller's where it gave some, else the operation's own.
class ResultMemory {
 public:
  ResultMemory() = default;
  /// `bytes` by tensor. Throws bad_alloc.
  ResultMemory(Operation& operation, std::span<const std::size_t> bytes);
  const Pieces& pieces() const noexcept { return pieces_; }
  /// A range that lies in one tensor.
  std::span<std::byte> part(Range range) const;

 private:
  Pieces pieces_;
};

/// Makes it; if the order says that it is large, together with the other ranks, and OperationFailed names those
/// that have no memory for it.
Task make_result(Context& context, std::vector<std::size_t> bytes, ResultMemory& memory);

/// A range of the result that one rank of the island gives to the others.
struct Contribution {
  std::size_t local;  // index of the giver in the island
  std::size_t begin;
  std::size_t bytes;
};

/// Passes ranges of `result`, in place, from the ranks that have them to all ranks of the island.
Task share_in_island(Context& context, const Pieces& result,
                     std::span<const Contribution> contributions);

/// Work of each rank of the island on each chunk of a passage.
struct Passage {
  std::uint64_t chunks = 0;  // equal on all ranks of the island
  /// Puts what the others want into this rank's slot.
  std::function<void(std::uint64_t chunk, std::byte* slot)> fill;
  /// Takes what it wants from the others' slots, which are `slot(rank, number)`.
  std::function<void(std::uint64_t chunk, std::uint64_t number)> take;
};

/// Passes chunks through the slots of the island: one is filled while the one before is taken.
Task pass_through_slots(Context& context, Passage passage);

/// Holds when everyone has read what was in the slots of chunk `number` before, also the ranks that
/// take no part.
inline Communicator::Reached slot_is_free(const Communicator& communicator, std::uint64_t number) {
  const std::uint64_t slots = communicator.num_slots();
  return communicator.reached(communicator.team(), Stage::kCopiedOut,
                              number + 1 > slots ? number + 1 - slots : 0);
}

/// Every stage of everything before the next chunk is done.
void publish_all(Communicator& communicator);

/// Scaling and operation as the kernels want them: Average is Sum with a divisor.
ReduceOp kernel_op(const Context& context) noexcept;
Scaling scaling_of(const Context& context) noexcept;

/// Bytes of all tensors of a descriptor.
std::size_t total_bytes(const Descriptor& descriptor);
/// The bytes of all tensors that one of the members gets when first dimensions are divided.
RangeList rows_of(const Descriptor& descriptor, std::size_t members, std::size_t member);

}  // namespace sparkhvd
