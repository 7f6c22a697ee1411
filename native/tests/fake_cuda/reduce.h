// The elements of NCCL's types, and their reductions.
#pragma once

#include <cstddef>
#include <span>

#include "nccl/nccl_api.h"

namespace fake {

/// Bytes of one element; 0 for a type that is not there.
std::size_t size_of(sparkhvd::nccl::NcclDataType dtype);

/// Combines the inputs element by element, in order; halves in float32. All have the size of `out`,
/// which is different from all of them.
void reduce(std::span<std::byte> out, std::span<const std::byte* const> inputs,
            sparkhvd::nccl::NcclDataType dtype, sparkhvd::nccl::NcclOp op);

}  // namespace fake
