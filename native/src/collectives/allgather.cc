// Allgather of tensors with unequal first dimensions. Every block is sent over the network once to a rank of each other
// island. That rank passes it on to its island through shared memory.
#include <numeric>

#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "nccl/calls.h"

namespace sparkhvd {
namespace {

/// Positions of the blocks in the result: tensor after tensor, and inside a tensor by member.
class Blocks {
 public:
  Blocks(const Descriptor& descriptor, std::span<const std::int64_t> rows, std::size_t members)
      : members_(members) {
    const std::size_t element = element_size(descriptor.dtype);
    for (std::size_t tensor = 0; tensor < descriptor.shapes.size(); ++tensor) {
      const std::size_t row_bytes =
          row_elements(descriptor.shapes[tensor], descriptor.dtype) * element;
      for (const std::int64_t count : rows.subspan(tensor * members, members)) {
        blocks_.push_back({total_, static_cast<std::size_t>(count) * row_bytes});
        total_ += blocks_.back().size;
      }
    }
  }
  std::vector<std::size_t> bytes_by_tensor() const {
    std::vector<std::size_t> result(blocks_.size() / members_);
    for (std::size_t i = 0; i < blocks_.size(); ++i) result[i / members_] += blocks_[i].size;
    return result;
  }

  /// Calls `use(Range)` for each block of a member, in the order of the tensors.
  template <class Use>
  void for_member(std::size_t member, Use use) const {
    for (std::size_t i = member; i < blocks_.size(); i += members_) use(blocks_[i]);
  }

 private:
  std::size_t members_;
  std::vector<Range> blocks_;  // [tensor][member]
  std::size_t total_ = 0;
};

}  // namespace

Task allgather(Context& context) {
  context.algorithm = "allgather";
  Operation& operation = context.operation;
  const Team& team = context.team;
  const Blocks blocks(operation.descriptor, context.agreed.rows, team.size());
  operation.rows = context.agreed.rows;
  ResultMemory memory;
  co_await make_result(context, blocks.bytes_by_tensor(), memory);
  std::size_t read = 0;
  blocks.for_member(team.index(), [&](Range block) {
    operation.pieces.read(read, memory.part(block));
    read += block.size;
  });

  co_await gather_blocks(context, memory.pieces(), [&](std::size_t member, const UseRange& use) {
    blocks.for_member(member, use);
  });
}

Task gather_blocks(Context& context, const Pieces& whole, BlocksOf blocks_of) {
  const Team& team = context.team;
  Transfers transfers(context.communicator);
  const auto lend = [&](Range block, auto use) {
    whole.for_range(block.begin, block.size,
                    [&](const Pieces::Part& part) { use(std::span(part.output, part.bytes)); });
  };
  // Between islands: the blocks of local rank i go to local rank i mod size of the other island.
  std::vector<Contribution> contributions;
  const auto& islands = team.islands();
  for (std::size_t i = 0; i < islands.size(); ++i) {
    const bool is_own = i == team.island_index();
    for (std::size_t from = 0; from < islands[i].size(); ++from) {
      const Rank giver = islands[i][from];
      const std::size_t receiver = from % team.local_size();
      blocks_of(team.index_in(giver), [&](Range block) {
        contributions.push_back({receiver, block.begin, block.size});
        if (is_own || receiver != team.local_index()) return;
        lend(block, [&](std::span<std::byte> part) { transfers.receive(giver, part); });
      });
    }
    if (is_own) continue;
    const Rank taker = islands[i][team.local_index() % islands[i].size()];
    blocks_of(team.index(), [&](Range block) {
      lend(block, [&](std::span<std::byte> part) { transfers.send(taker, part); });
    });
  }
  co_await transfers.all_received();
  co_await share_in_island(context, whole, contributions);
  co_await transfers.all_sent();
}

namespace {

std::int64_t rows_of_allgather(const Descriptor&, const Execute& order, std::size_t tensor,
                               std::span<const Rank> members, std::size_t) {
  const auto rows = std::span(order.rows).subspan(tensor * members.size(), members.size());
  return std::reduce(rows.begin(), rows.end());
}

void enqueue_allgather(const nccl::Calls& calls, std::size_t tensor) {
  nccl::Rows rows = calls.shape(tensor);
  for (std::size_t member = 0; member < calls.members(); ++member) {
    rows.counts.push_back(
        static_cast<std::size_t>(calls.rows()[tensor * calls.members() + member]));
  }
  calls.gather_to_all(rows, calls.input(tensor), calls.output(tensor));
}

}  // namespace

extern const CollectiveSpec kAllgatherSpec = {.collective = Collective::kAllgather,
                                              .min_tensors = 1,
                                              .max_tensors = UINT32_MAX,
                                              .result = Result::kAgreed,
                                              .is_uneven = true,
                                              .check = take_digest,
                                              .write_rows = write_first_dimensions,
                                              .count_rows = count_first_dimensions,
                                              .are_rows_possible = are_first_dimensions_possible,
                                              .rows_of_result = rows_of_allgather,
                                              .run = allgather,
                                              .device_algorithm = "nccl_allgather",
                                              .enqueue = enqueue_allgather};

}  // namespace sparkhvd
