// Registered memory as the C boundary hands it out.
#pragma once

#include <memory>

#include "nccl/device_operation.h"
#include "segment.h"
#include "types.h"

struct sparkhvd_buffer {
  std::shared_ptr<sparkhvd::Segment> segment;
  sparkhvd::Rank rank;
  std::shared_ptr<sparkhvd::nccl::DeviceBuffer> device;  // instead of a segment
};
