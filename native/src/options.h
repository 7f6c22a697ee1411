// Reading of the options that callers pass through the C interface: checks and copies them.
#pragma once

#include "engine/core.h"
#include "nccl/device.h"
#include "sparkhvd.h"

namespace sparkhvd {

/// Checks and copies the options, and takes ownership of the sockets even if it throws. Throws InvalidArgument with the
/// wrong value.
EngineOptions read_options(const sparkhvd_engine_options* given);
nccl::DeviceOptions read_device_options(const sparkhvd_device_options* given);

}  // namespace sparkhvd
