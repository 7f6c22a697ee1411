// Allreduce of one rank, because it is alone or all other ranks have joined: applies only the factors.
#include "collectives/collectives.h"

namespace sparkhvd {

Task lone_allreduce(Context& context) {
  context.algorithm = "lone";
  const Operation& operation = context.operation;
  const DType dtype = operation.descriptor.dtype;
  operation.pieces.for_range(0, operation.pieces.bytes(), [&](const Pieces::Part& part) {
    const void* sources[] = {part.input};
    context.kernels.reduce(dtype, kernel_op(context), part.output, sources,
                           part.bytes / element_size(dtype), scaling_of(context));
  });
  co_return;
}

}  // namespace sparkhvd
