// The plane's interface to an operation on the device.
#pragma once

#include "nccl/calls.h"
#include "nccl/device_operation.h"

namespace sparkhvd::nccl {

/// Bytes of zeros and of room for results that a joined rank needs.
std::size_t scratch_bytes(const Descriptor& descriptor);

/// True if any rank moves a byte; nothing is enqueued otherwise.
bool has_work(const Launch& launch);

/// The calls of one operation, inside of the caller's group.
void enqueue(const Calls& calls);

}  // namespace sparkhvd::nccl
