// Declarations of all collectives; each algorithm has a file. All ranks of the team call a collective in the same
// order, and every rank gets the same bits.
//
// A task owns the memory of its operation until it ends. If a task must stop early, the engine destroys it, after the
// links have released the memory that the task lent them.
//
// Chunks in shared memory have numbers that count since the start, equally on all ranks of an island. An operation that
// uses chunks advances the number. When it ends, it has published every stage for all of its chunks.
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

/// What a running collective needs from the engine, and what it returns to it.
struct Context {
  Communicator& communicator;
  const Kernels& kernels;
  Operation& operation;
  Execute agreed;
  /// Ranks that take part: the process set without the ranks that have joined. This rank is in it.
  Team team;
  Schedule schedule = {};
  /// Name of the chosen algorithm, for counters and the timeline.
  const char* algorithm = "";
  /// The new memory, after share_memory.
  std::shared_ptr<Segment> segment = {};
  /// Warnings that the engine prints on stderr.
  std::vector<std::string> warnings = {};
};

/// Allreduce. The algorithm depends on the islands of the ranks and the memory of the tensors. For Adasum the team's
/// size must be a power of two.
Task allreduce(Context& context);
/// Number of chunks that an allreduce uses in each island with shared memory. Ranks of the island that have joined also
/// advance by this number, and publish every stage, when the operation's turn comes.
std::uint64_t chunks_of(const Communicator& communicator, const Team& team,
                        const Descriptor& descriptor, const Execute& agreed);

/// Allreduce of one rank: applies only the factors.
Task lone_allreduce(Context& context);
/// Allreduce if all ranks share memory. Bytes per rank with N ranks: 2S(N-1)/N copied, S + S/N reduced.
Task shared_allreduce(Context& context);
std::uint64_t shared_allreduce_chunks(const Communicator& communicator,
                                      const Descriptor& descriptor);
/// Allreduce if all ranks share memory and have copied their tensors into mailboxes: every rank reduces all copies
/// itself, without waiting.
Task mailbox_allreduce(Context& context);
/// Allreduce in place, if all ranks share the memory of the tensors. The first rank to arrive does more of the work. 2S
/// bytes move per rank.
Task registered_allreduce(Context& context);
/// Allreduce of small tensors if no two ranks share memory: every rank sends its tensors to all other ranks, in one
/// step.
Task symmetric_allreduce(Context& context);
/// Allreduce over several islands: reduces inside the islands, exchanges between them, and shares the result inside
/// them.
Task island_allreduce(Context& context);
std::uint64_t island_allreduce_chunks(const Communicator& communicator, const Team& team,
                                      const Descriptor& descriptor, const Execute& agreed);
/// Allreduce with Adasum (arXiv:2006.02924): recursive doubling with whole vectors.
Task adasum_allreduce(Context& context);

Task allgather(Context& context);
/// The inverse of reducescatter, in place.
Task allgather_into(Context& context);
Task broadcast(Context& context);
Task alltoall(Context& context);
Task reducescatter(Context& context);
/// Reduces the tensors of all ranks to the root.
Task reduce(Context& context);
/// Concatenates the tensors of all ranks on the root, along the first dimension.
Task gather(Context& context);
/// Sends each rank its rows of the root's tensor.
Task scatter(Context& context);

/// Allocates `bytes` of new memory on every rank of the team and maps the pieces of its island into `context.segment`.
/// If a rank of the island fails, the segment has only this rank's own piece (or no piece, if this rank failed). At the
/// end all ranks of the team have answered, and ranks that share no memory are islands of one rank in `context.team`.
/// With kOnePiece only the first rank of an island allocates memory; if a rank could not map it, no rank has a segment.
Task share_memory(Context& context, std::size_t bytes,
                  Segment::Kind kind = Segment::Kind::kPieceEach);

// Steps that several collectives use:

/// Reduces this rank's rows of the operation's tensors into `results`. `descriptor` has the shapes that are divided.
/// The tensors must not be empty.
Task divide_and_reduce(Context& context, const Descriptor& descriptor, const Pieces& results);

/// Sends every rank's blocks to all other ranks. A block has the same position in `whole` on all ranks.
/// `blocks_of(member, use)` calls `use(Range)` for each block of a member, in the same order on all ranks.
using UseRange = std::function<void(Range)>;
using BlocksOf = std::function<void(std::size_t member, const UseRange& use)>;
Task gather_blocks(Context& context, const Pieces& whole, BlocksOf blocks_of);

/// Passes parts of the island's ranks to one rank of the island, `taker`. `bytes`: sizes of the parts by local index.
/// Each rank's `read(begin, target)` copies bytes of its own part; the taker's `take(local, begin, source)` gets the
/// bytes of rank `local`.
struct Delivery {
  Rank taker;
  std::vector<std::size_t> bytes = {};
  std::function<void(std::size_t begin, std::span<std::byte> target)> read = {};
  std::function<void(std::size_t local, std::size_t begin, std::span<const std::byte> source)>
      take = {};
};
Task deliver_in_island(Context& context, Delivery delivery);

/// Memory for a result of negotiated size, tensor after tensor: the caller's memory if given, else allocated memory.
class ResultMemory {
 public:
  ResultMemory() = default;
  /// `bytes`: size of each tensor's result. Throws bad_alloc.
  ResultMemory(Operation& operation, std::span<const std::size_t> bytes);
  const Pieces& pieces() const noexcept { return pieces_; }
  /// The memory of a range, which must be inside one tensor.
  std::span<std::byte> part(Range range) const;

 private:
  Pieces pieces_;
};

/// Allocates the memory of a result. If the order asks for it (`asks_for_memory`), all ranks first report whether they
/// have memory. Throws OperationFailed with the ranks that have no memory.
Task make_result(Context& context, std::vector<std::size_t> bytes, ResultMemory& memory);

/// A range of the result that one rank of the island passes to the other ranks.
struct Contribution {
  std::size_t local;  // index of the sender in the island
  std::size_t begin;
  std::size_t bytes;
};

/// Passes ranges of `result`, in place, from their owners to all ranks of the island.
Task share_in_island(Context& context, const Pieces& result,
                     std::span<const Contribution> contributions);

/// Work of a rank on each chunk that passes through the slots of the island.
struct Passage {
  std::uint64_t chunks = 0;  // equal on all ranks of the island
  /// Copies the data for the other ranks into this rank's slot.
  std::function<void(std::uint64_t chunk, std::byte* slot)> fill;
  /// Copies this rank's data from the slots of the other ranks, `slot(rank, number)`.
  std::function<void(std::uint64_t chunk, std::uint64_t number)> take;
};

/// Passes chunks through the slots of the island. A slot is filled while the ranks read the previous slot.
Task pass_through_slots(Context& context, Passage passage);

/// Holds when all ranks of the island have read the previous content of the slots of chunk `number`. This includes
/// ranks that do not take part.
inline Communicator::Reached slot_is_free(const Communicator& communicator, std::uint64_t number) {
  const std::uint64_t slots = communicator.num_slots();
  return communicator.reached(communicator.team(), Stage::kCopiedOut,
                              number + 1 > slots ? number + 1 - slots : 0);
}

/// Publishes every stage for all chunks before the next chunk.
void publish_all(Communicator& communicator);

// The kernels' operation and scaling: Average is Sum with a divisor.
ReduceOp kernel_op(const Context& context) noexcept;
Scaling scaling_of(const Context& context) noexcept;

/// Bytes of all tensors of a descriptor.
std::size_t total_bytes(const Descriptor& descriptor);
/// The ranges of all tensors' bytes that a member gets when their first dimensions are divided.
RangeList rows_of(const Descriptor& descriptor, std::size_t members, std::size_t member);

}  // namespace sparkhvd
