// Options of callers, checked and copied: from the structures of the C boundary.
#pragma once

#include "engine/core.h"
#include "nccl/device.h"
#include "sparkhvd.h"

namespace sparkhvd {

/// Takes the sockets, also if it throws InvalidArgument, which shows the wrong value.
EngineOptions read_options(const sparkhvd_engine_options* given);
nccl::DeviceOptions read_device_options(const sparkhvd_device_options* given);

}  // namespace sparkhvd
