// Allreduce: chooses the algorithm by the islands of the ranks and the memory of the tensors.
#include <algorithm>
#include <bit>

#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "error.h"
#include "nccl/calls.h"

namespace sparkhvd {
namespace {

// Up to this size every rank reduces all data itself: this sends more bytes, but saves a message.
constexpr std::size_t kSymmetricBytes = 16 << 10;

enum class Choice { kNothing, kLone, kShared, kMailbox, kRegistered, kSymmetric, kIslands };

bool are_mailboxes(const Communicator& communicator, const Execute& agreed) {
  const Segment* own = communicator.segment();
  return own != nullptr && std::ranges::all_of(agreed.places, [&](const Place& place) {
           return place.segment == own->key();
         });
}

/// Chooses the algorithm. The choice is equal on all ranks, including the ranks that have joined.
Choice choose(const Communicator& communicator, const Team& team, const Descriptor& descriptor,
              const Execute& agreed) {
  const std::size_t bytes = total_bytes(descriptor);
  if (bytes == 0) return Choice::kNothing;
  if (team.size() == 1) return Choice::kLone;
  if (team.is_one_island()) {
    if (agreed.places.empty()) return Choice::kShared;
    return are_mailboxes(communicator, agreed) ? Choice::kMailbox : Choice::kRegistered;
  }
  if (team.is_all_alone() && team.size() <= communicator.knobs().direct_ranks &&
      bytes <= kSymmetricBytes) {
    return Choice::kSymmetric;
  }
  return Choice::kIslands;
}

}  // namespace

Task allreduce(Context& context) {
  const Descriptor& descriptor = context.operation.descriptor;
  const auto run = [&](const char* name, Task (*algorithm)(Context&)) {
    context.operation.trace.algorithm = name;
    return algorithm(context);
  };
  if (descriptor.reduce_op == ReduceOp::kAdasum) {
    if (!std::has_single_bit(context.team.size())) {
      throw Error(SPARKHVD_INTERNAL,
                  "Adasum was agreed on for a number of ranks that is no power "
                  "of two.");
    }
    return run("adasum_allreduce", adasum_allreduce);
  }
  switch (choose(context.communicator, context.team, descriptor, context.agreed)) {
    case Choice::kNothing:
      return {};
    case Choice::kLone:
      return run("lone_allreduce", lone_allreduce);
    case Choice::kShared:
      return run("shared_allreduce", shared_allreduce);
    case Choice::kMailbox:
      return run("mailbox_allreduce", mailbox_allreduce);
    case Choice::kRegistered:
      return run("registered_allreduce", registered_allreduce);
    case Choice::kSymmetric:
      return run("symmetric_allreduce", symmetric_allreduce);
    case Choice::kIslands:
      break;
  }
  return run("island_allreduce", island_allreduce);
}

std::uint64_t chunks_of(const Communicator& communicator, const Team& team,
                        const Descriptor& descriptor, const Execute& agreed) {
  switch (choose(communicator, team, descriptor, agreed)) {
    case Choice::kShared:
      return shared_allreduce_chunks(communicator, descriptor);
    case Choice::kIslands:
      return island_allreduce_chunks(communicator, team, descriptor, agreed);
    default:
      return 0;
  }
}

namespace {

void enqueue_allreduce(const nccl::Calls& calls, std::size_t tensor) {
  calls.allreduce(calls.input(tensor), calls.output(tensor), calls.elements(tensor));
}

}  // namespace

extern const CollectiveSpec kAllreduceSpec = {.collective = Collective::kAllreduce,
                                              .max_tensors = UINT32_MAX,
                                              .reduces = true,
                                              .result = Result::kSameShape,
                                              .goes_on_without_joined = true,
                                              .check = take_digest,
                                              .run = allreduce,
                                              .device_algorithm = "nccl_allreduce",
                                              .enqueue = enqueue_allreduce};

}  // namespace sparkhvd
