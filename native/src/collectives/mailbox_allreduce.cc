// Allreduce of small tensors that every rank copied into shared memory at submission. After all ranks have submitted,
// every rank reduces all copies itself, without further waits.
#include "collectives/collectives.h"

namespace sparkhvd {

Task mailbox_allreduce(Context& context) {
  context.algorithm = "mailbox";
  const Operation& operation = context.operation;
  const DType dtype = operation.descriptor.dtype;
  std::vector<const void*> sources(operation.registered.size());
  std::size_t begin = 0;
  operation.pieces.for_range(0, operation.pieces.bytes(), [&](const Pieces::Part& part) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sources[i] = operation.registered[i] + begin;
    }
    context.kernels.reduce(dtype, kernel_op(context), part.output, sources,
                           part.bytes / element_size(dtype), scaling_of(context));
    begin += part.bytes;
  });
  co_return;
}

}  // namespace sparkhvd
