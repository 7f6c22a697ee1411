// What the plane asks of an operation on the device.
#pragma once

#include "nccl/calls.h"
#include "nccl/device_operation.h"

namespace sparkhvd::nccl {

/// Bytes that a rank which has joined needs of zeros and of room for results.
std::size_t scratch_bytes(const Descriptor& descriptor);

/// True if any rank moves a byte; nothing is enqueued otherwise.
bool has_work(const Launch& launch);

/// The calls of one operation, inside of a group that the caller has begun.
void enqueue(const Calls& calls);

}  // namespace sparkhvd::nccl
