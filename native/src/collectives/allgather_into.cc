// The inverse of reducescatter, in place: an allgather of blocks that are already at their final positions, so no
// memory is allocated or copied.
#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "nccl/calls.h"

namespace sparkhvd {

Task allgather_into(Context& context) {
  context.algorithm = "allgather_into";
  const Descriptor& descriptor = context.operation.descriptor;
  co_await gather_blocks(
      context, context.operation.pieces, [&](std::size_t member, const UseRange& use) {
        const RangeList rows = rows_of(descriptor, context.team.size(), member);
        rows.for_range(0, rows.size(), [&](std::size_t begin, std::size_t, std::size_t bytes) {
          use({begin, bytes});
        });
      });
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
