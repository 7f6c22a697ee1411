#include "collectives/collectives.h"

#include <algorithm>
#include <bit>

#include "error.h"

namespace sparkhvd {
namespace {

enum class Choice { kNothing, kLone, kShared, kMailbox, kRegistered, kSymmetric, kIslands };

bool are_mailboxes(const Communicator& communicator, const Execute& agreed) {
  const Segment* own = communicator.segment();
  return own != nullptr && std::ranges::all_of(agreed.places, [&](const Place& place) {
           return place.segment == own->key();
         });
}

/// Equal on all ranks, and on the ranks that have joined.
Choice choose(const Communicator& communicator, const Team& team, const Descriptor& descriptor,
              const Execute& agreed) {
  const std::size_t bytes = total_bytes(descriptor);
  if (bytes == 0) return Choice::kNothing;
  if (team.size() == 1) return Choice::kLone;
  if (team.is_one_island()) {
    if (agreed.places.empty()) return Choice::kShared;
    return are_mailboxes(communicator, agreed) ? Choice::kMailbox : Choice::kRegistered;
  }
  const Knobs& knobs = communicator.knobs();
  if (team.is_all_alone() && team.size() <= knobs.direct_ranks && bytes <= knobs.symmetric_bytes) {
    return Choice::kSymmetric;
  }
  return Choice::kIslands;
}

}  // namespace

Task run_collective(Context& context) {
  const Collective collective = context.operation.descriptor.collective;
  context.operation.trace.algorithm = name_of(collective).data();
  switch (collective) {
    case Collective::kAllreduce:
      return allreduce(context);
    case Collective::kAllgather:
      return allgather(context);
    case Collective::kAllgatherInto:
      return allgather_into(context);
    case Collective::kBroadcast:
      return broadcast(context);
    case Collective::kAlltoall:
      return alltoall(context);
    case Collective::kReducescatter:
      return reducescatter(context);
    default:
      break;
  }
  throw Error(SPARKHVD_INTERNAL, "a collective without an implementation was agreed on.");
}

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

void publish_all(Communicator& communicator) {
  for (const Stage stage : {Stage::kCopiedIn, Stage::kReduced, Stage::kCopiedOut}) {
    communicator.publish(stage, communicator.next_chunk());
  }
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
    // Also of the ranks that have joined: they count as zeros.
    scaling.divisor = static_cast<int>(context.communicator.team().size());
  }
  return scaling;
}

RangeList rows_of(const Descriptor& descriptor, std::size_t members, std::size_t member) {
  RangeList slice;
  std::size_t begin = 0;
  for (const auto& shape : descriptor.shapes) {
    const std::size_t row_bytes =
        row_elements(shape, descriptor.dtype) * element_size(descriptor.dtype);
    const auto rows = static_cast<std::size_t>(shape.at(0));
    const std::size_t before = member * (rows / members) + std::min(member, rows % members);
    const std::size_t own = rows / members + (member < rows % members ? 1 : 0);
    slice.add({begin + before * row_bytes, own * row_bytes});
    begin += rows * row_bytes;
  }
  return slice;
}

std::size_t total_bytes(const Descriptor& descriptor) {
  std::size_t elements = 0;
  for (const auto& shape : descriptor.shapes) elements += *count_elements(shape, descriptor.dtype);
  return elements * element_size(descriptor.dtype);
}

std::size_t row_elements(std::span<const std::int64_t> shape, DType dtype) {
  return *count_elements(shape.empty() ? shape : shape.subspan(1), dtype);
}

}  // namespace sparkhvd
