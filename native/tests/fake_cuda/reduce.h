// The elements of NCCL's types, and their reductions.
#pragma once

#include <cstddef>
#include <span>

#include "nccl/nccl_api.h"

namespace fake {

/// Bytes of an element; 0 for an unknown type.
std::size_t size_of(sparkhvd::nccl::NcclDataType dtype);

/// Combines the inputs element by element, in order; 16-bit floats in float32. All inputs have the size of `out`, and
/// none of them is `out`.
void reduce(std::span<std::byte> out, std::span<const std::byte* const> inputs,
            sparkhvd::nccl::NcclDataType dtype, sparkhvd::nccl::NcclOp op);

}  // namespace fake
