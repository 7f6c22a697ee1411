#include "nccl/device_collectives.h"

#include <algorithm>

#include "collectives/spec.h"

namespace sparkhvd::nccl {

std::size_t scratch_bytes(const Descriptor& descriptor) {
  std::size_t most = 0;
  for (const auto& shape : descriptor.shapes) {
    const std::size_t bytes =
        count_elements(shape, descriptor.dtype).value() * element_size(descriptor.dtype);
    most = std::max(most, bytes);
  }
  return most;
}

bool has_work(const Launch& launch) {
  const Descriptor& descriptor = launch.descriptor();
  const CollectiveSpec& spec = spec_of(descriptor.collective);
  if (spec.enqueue == nullptr) return false;
  for (std::size_t i = 0; i < descriptor.shapes.size(); ++i) {
    std::vector<std::int64_t> shape = descriptor.shapes[i];
    if (spec.is_uneven && !shape.empty()) {
      // This rank's own rows do not show whether other ranks have rows.
      const std::size_t per_tensor = launch.rows.size() / descriptor.shapes.size();
      const auto rows = std::span(launch.rows).subspan(i * per_tensor, per_tensor);
      shape[0] = std::ranges::any_of(rows, [](auto count) { return count > 0; }) ? 1 : 0;
    }
    if (count_elements(shape, descriptor.dtype).value() > 0) return true;
  }
  return false;
}

void enqueue(const Calls& calls) {
  const Descriptor& descriptor = calls.descriptor();
  const CollectiveSpec& spec = spec_of(descriptor.collective);
  for (std::size_t i = 0; i < descriptor.shapes.size(); ++i) spec.enqueue(calls, i);
}

}  // namespace sparkhvd::nccl
