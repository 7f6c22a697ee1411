#include "collectives/collectives.h"

#include <algorithm>

namespace sparkhvd {

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
    // Ranks that have joined count too: they contribute zeros.
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

}  // namespace sparkhvd
