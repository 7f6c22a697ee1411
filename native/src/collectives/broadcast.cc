// Broadcast between islands. A small tensor moves down a binomial tree with one rank per island, in log2 P messages one
// after the other. A large tensor is scattered and gathered, step by step. In each step the root sends a different part
// to every rank of the other islands. Each of these ranks sends its part to a rank of each further island, and the
// ranks of an island exchange the received parts through shared memory. So the root sends the tensor once, for any
// number of islands. (Barnett et al., "Interprocessor collective communication library", 1994, except that the root
// takes no part in the allgather, because it has the whole tensor.)
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "nccl/calls.h"

namespace sparkhvd {
namespace {

// Up to this size the time depends on the number of messages and not on their bytes. Scattering needs about a message
// per island on the root and every other rank; the tree needs log2 P messages.
constexpr std::size_t kTreeBytes = 64 << 10;
constexpr std::size_t kTreeBytesPerIsland = 8 << 10;
// Bytes from the root to a rank in a step. There should be several steps, because the parts of a step are passed on
// while the next step is in flight.
constexpr std::size_t kMinScatteredBytes = 32 << 10;
constexpr std::size_t kMaxScatteredBytes = 512 << 10;
constexpr std::size_t kSteps = 8;
// Parts are sent to the other islands this number of steps before they are shared inside the island, so that no island
// waits for the slots of another island.
constexpr std::size_t kStepsAhead = 2;

/// The outputs of these tensors, as tensors with equal input and output.
Pieces outputs_of(const Pieces& pieces) {
  Pieces outputs;
  pieces.for_range(0, pieces.bytes(), [&](const Pieces::Part& part) {
    outputs.add(part.output, part.output, part.bytes);
  });
  return outputs;
}

std::size_t place_in(const std::vector<Rank>& island, Rank rank) {
  return static_cast<std::size_t>(std::ranges::find(island, rank) - island.begin());
}

void send(Transfers& transfers, Rank to, const Pieces& tensors, Range range) {
  tensors.for_range(range.begin, range.size, [&](const Pieces::Part& part) {
    transfers.send(to, {part.output, part.bytes});
  });
}

void receive(Transfers& transfers, Rank from, const Pieces& tensors, Range range) {
  tensors.for_range(range.begin, range.size, [&](const Pieces::Part& part) {
    transfers.receive(from, {part.output, part.bytes});
  });
}

/// Broadcasts down a binomial tree with one rank per island. The root has number 0; a child's number is its parent's
/// number with an additional bit.
Task go_down_tree(Context& context, const Pieces& tensors) {
  const Team& team = context.team;
  const Rank root = context.operation.descriptor.root;
  const std::size_t size = team.islands().size();
  const std::size_t first = team.island_index_of(root);
  const auto head = [&](std::size_t number) {
    return number == 0 ? root : team.islands()[(first + number) % size][0];
  };
  const std::size_t me = (team.island_index() + size - first) % size;
  const Range whole{0, tensors.bytes()};
  Transfers transfers(context.communicator);
  if (team.self() == head(me)) {
    std::size_t bit = 1;
    while (bit < size && (me & bit) == 0) bit *= 2;
    if (me != 0) receive(transfers, head(me - bit), tensors, whole);
    co_await transfers.all_received();
    for (bit /= 2; bit > 0; bit /= 2) {
      if (me + bit < size) send(transfers, head(me + bit), tensors, whole);
    }
  }
  const Contribution all[] = {{place_in(team.island(), head(me)), 0, whole.size}};
  co_await share_in_island(context, tensors, all);
  co_await transfers.all_sent();
}

/// Routes of the parts of a step. Every rank outside of the root's island owns a part.
class Scattering {
 public:
  Scattering(const Team& team, Rank root, std::size_t bytes)
      : team_(team), bytes_(bytes), root_island_(team.island_index_of(root)) {
    for (std::size_t i = 0; i < team.islands().size(); ++i) {
      if (i == root_island_) continue;
      for (const Rank rank : team.islands()[i]) owners_.push_back({rank, i});
    }
    const std::size_t part =
        std::clamp(bytes / owners_.size() / kSteps, kMinScatteredBytes, kMaxScatteredBytes);
    step_bytes_ = part / 64 * 64 * owners_.size();
  }

  std::size_t steps() const noexcept { return (bytes_ + step_bytes_ - 1) / step_bytes_; }

  /// Calls `use(owner, Range)` for each part of a step.
  template <class Use>
  void for_parts(std::size_t step, Use use) const {
    const std::size_t begin = step * step_bytes_;
    const std::size_t size = std::min(step_bytes_, bytes_ - begin);
    for (std::size_t owner = 0; owner < owners_.size(); ++owner) {
      const Range range = part_of(size, owners_.size(), owner, 1);
      use(owner, Range{begin + range.begin, range.size});
    }
  }

  Rank rank(std::size_t owner) const noexcept { return owners_[owner].rank; }
  bool is_of_root(std::size_t island) const noexcept { return island == root_island_; }
  bool is_in_island(std::size_t owner, std::size_t island) const noexcept {
    return owners_[owner].island == island;
  }
  /// Local index of the rank that receives a part in an island: the owner, or else a rank chosen round-robin.
  std::size_t taker(std::size_t owner, std::size_t island) const {
    const auto& ranks = team_.islands()[island];
    return is_in_island(owner, island) ? place_in(ranks, rank(owner)) : owner % ranks.size();
  }

 private:
  struct Owner {
    Rank rank;
    std::size_t island;
  };
  const Team& team_;
  std::size_t bytes_;
  std::size_t root_island_;
  std::vector<Owner> owners_;
  std::size_t step_bytes_;
};

/// Work of the root's island: the root sends all parts, and shares the tensor with its island.
Task scatter_parts(Context& context, const Pieces& tensors, const Scattering& scattering) {
  const Team& team = context.team;
  const Rank root = context.operation.descriptor.root;
  Transfers transfers(context.communicator);
  for (std::size_t step = 0; team.self() == root && step < scattering.steps(); ++step) {
    scattering.for_parts(step, [&](std::size_t owner, Range range) {
      send(transfers, scattering.rank(owner), tensors, range);
    });
  }
  const Contribution all[] = {{place_in(team.island(), root), 0, tensors.bytes()}};
  co_await share_in_island(context, tensors, all);
  co_await transfers.all_sent();
}

/// Work of the other islands. A step of the loop waits only for earlier steps of the other ranks, so at least one rank
/// can always continue.
Task pass_on(Context& context, const Pieces& tensors, const Scattering& scattering) {
  const Team& team = context.team;
  const Rank root = context.operation.descriptor.root;
  const std::size_t here = team.island_index();
  const std::size_t steps = scattering.steps();
  Transfers sent(context.communicator);
  std::vector<Transfers> own(steps, Transfers(context.communicator));
  std::vector<Transfers> others(steps, Transfers(context.communicator));
  for (std::size_t step = 0; step < steps; ++step) {
    scattering.for_parts(step, [&](std::size_t owner, Range range) {
      if (scattering.taker(owner, here) != team.local_index()) return;
      const bool is_own = scattering.rank(owner) == team.self();
      receive(is_own ? own[step] : others[step], is_own ? root : scattering.rank(owner), tensors,
              range);
    });
  }
  for (std::size_t step = 0; step < steps + kStepsAhead; ++step) {
    if (step < steps) {
      co_await own[step].all_received();
      scattering.for_parts(step, [&](std::size_t owner, Range range) {
        if (scattering.rank(owner) != team.self()) return;
        for (std::size_t i = 0; i < team.islands().size(); ++i) {
          if (i == here || scattering.is_of_root(i)) continue;
          send(sent, team.islands()[i][scattering.taker(owner, i)], tensors, range);
        }
      });
    }
    if (step < kStepsAhead) continue;
    const std::size_t arrived = step - kStepsAhead;
    co_await others[arrived].all_received();
    std::vector<Contribution> contributions;
    scattering.for_parts(arrived, [&](std::size_t owner, Range range) {
      contributions.push_back({scattering.taker(owner, here), range.begin, range.size});
    });
    co_await share_in_island(context, tensors, contributions);
  }
  co_await sent.all_sent();
}

}  // namespace

Task broadcast(Context& context) {
  context.algorithm = "broadcast";
  const Team& team = context.team;
  const Pieces& pieces = context.operation.pieces;
  const std::size_t bytes = pieces.bytes();
  if (bytes == 0) co_return;
  const Rank root = context.operation.descriptor.root;
  if (team.self() == root) {
    pieces.for_range(0, bytes, [&](const Pieces::Part& part) {
      if (part.input != part.output) std::memcpy(part.output, part.input, part.bytes);
    });
  }
  const Pieces tensors = outputs_of(pieces);
  const std::size_t islands = team.islands().size();
  if (islands == 1 || bytes <= std::max(kTreeBytes, islands * kTreeBytesPerIsland)) {
    co_await go_down_tree(context, tensors);
    co_return;
  }
  const Scattering scattering(team, root, bytes);
  if (scattering.is_of_root(team.island_index())) {
    co_await scatter_parts(context, tensors, scattering);
  } else {
    co_await pass_on(context, tensors, scattering);
  }
}

namespace {

void enqueue_broadcast(const nccl::Calls& calls, std::size_t tensor) {
  const Descriptor& descriptor = calls.descriptor();
  calls.broadcast(calls.input(tensor), calls.output(tensor),
                  calls.elements(tensor) * element_size(descriptor.dtype),
                  calls.index_of(descriptor.root));
}

}  // namespace

extern const CollectiveSpec kBroadcastSpec = {.collective = Collective::kBroadcast,
                                              .min_tensors = 1,
                                              .max_tensors = 1,
                                              .has_root = true,
                                              .result = Result::kSameShape,
                                              .check = take_no_numbers,
                                              .run = broadcast,
                                              .device_algorithm = "nccl_broadcast",
                                              .enqueue = enqueue_broadcast};

}  // namespace sparkhvd
