// The inverse of reducescatter, in place: of every tensor each rank has its rows, and gets the others'.
// As in allgather every block goes once over the network to one rank of each other island, and from
// there through shared memory to the rest; but nothing is allocated, and nothing copied that is there.
#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "nccl/calls.h"

namespace sparkhvd {

Task allgather_into(Context& context) {
  context.algorithm = "allgather_into";
  const Team& team = context.team;
  const Pieces& tensors = context.operation.pieces;
  const Descriptor& descriptor = context.operation.descriptor;
  const auto for_rows = [&](Rank rank, auto use) {
    const RangeList rows = rows_of(descriptor, team.size(), team.index_in(rank));
    rows.for_range(0, rows.size(), [&](std::size_t begin, std::size_t, std::size_t bytes) {
      use(Range{begin, bytes});
    });
  };

  // Between islands: the rows of local rank i go to local rank i mod size of the other island.
  Transfers transfers(context.communicator);
  const auto lend = [&](Range range, auto use) {
    tensors.for_range(range.begin, range.size,
                      [&](const Pieces::Part& part) { use(std::span(part.output, part.bytes)); });
  };
  std::vector<Contribution> contributions;
  const auto& islands = team.islands();
  for (std::size_t i = 0; i < islands.size(); ++i) {
    const bool is_own = i == team.island_index();
    for (std::size_t from = 0; from < islands[i].size(); ++from) {
      const Rank giver = islands[i][from];
      const std::size_t receiver = from % team.local_size();
      for_rows(giver, [&](Range range) {
        contributions.push_back({receiver, range.begin, range.size});
        if (is_own || receiver != team.local_index()) return;
        lend(range, [&](std::span<std::byte> part) { transfers.receive(giver, part); });
      });
    }
    if (is_own) continue;
    const Rank taker = islands[i][team.local_index() % islands[i].size()];
    for_rows(team.self(), [&](Range range) {
      lend(range, [&](std::span<std::byte> part) { transfers.send(taker, part); });
    });
  }
  co_await transfers.all_received();
  co_await share_in_island(context, tensors, contributions);
  co_await transfers.all_sent();
}

namespace {

void enqueue_allgather_into(const nccl::Calls& calls, std::size_t tensor) {
  const nccl::Rows rows = calls.divided_rows(tensor);
  std::byte* output = calls.output(tensor);
  calls.gather_to_all(rows, output + rows.offset(calls.index()), output);
}

}  // namespace

extern const CollectiveSpec kAllgatherIntoSpec = {.collective = Collective::kAllgatherInto,
                                                  .min_tensors = 1,
                                                  .max_tensors = UINT32_MAX,
                                                  .result = Result::kInPlace,
                                                  .divides_rows = true,
                                                  .check = take_digest,
                                                  .run = allgather_into,
                                                  .device_algorithm = "nccl_allgather_into",
                                                  .enqueue = enqueue_allgather_into};

}  // namespace sparkhvd
