// Functions with which the plane runs an operation on the device.
#pragma once

#include "nccl/calls.h"
#include "nccl/device_operation.h"

namespace sparkhvd::nccl {

/// Bytes of zeros, and bytes for results, that a rank needs after it has joined.
std::size_t scratch_bytes(const Descriptor& descriptor);

/// True if a rank moves a byte. Otherwise the plane enqueues nothing.
bool has_work(const Launch& launch);

/// Enqueues the calls of one operation. The caller has started an NCCL group.
void enqueue(const Calls& calls);

}  // namespace sparkhvd::nccl
