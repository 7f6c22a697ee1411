// Operations as calls of NCCL. Everything here only enqueues.
#pragma once

#include <span>

#include "nccl/device_operation.h"
#include "nccl/nccl_api.h"

namespace sparkhvd::nccl {

/// Memory for a rank that has joined: it brings zeros, and its results are not read.
struct Scratch {
  const std::byte* zeros = nullptr;
  std::byte* results = nullptr;
};

/// Bytes that a rank which has joined needs of each.
std::size_t scratch_bytes(const Descriptor& descriptor);

/// True if any rank moves a byte; nothing is enqueued otherwise.
bool has_work(const Launch& launch);

/// The calls of one operation, inside of a group that the caller has begun. `tensors`: the caller's, or
/// empty for a rank that has joined.
void enqueue(const NcclApi& nccl, ncclComm_t communicator, NcclStream stream, const Launch& launch,
             std::span<const OnDevice::Tensor> tensors, const Scratch& scratch);

/// "nccl_allreduce" for counters and the timeline; a string literal.
const char* algorithm_of(Collective collective) noexcept;

/// NCCL's type for reductions; nothing if it has none.
std::optional<NcclDataType> nccl_type(DType dtype) noexcept;
/// NCCL's operation on it; nothing if it has none (Average, Adasum).
std::optional<NcclOp> nccl_op(ReduceOp op, DType dtype) noexcept;

}  // namespace sparkhvd::nccl
