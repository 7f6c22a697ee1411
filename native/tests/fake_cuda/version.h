// The version that the stand-in for libnccl reports: FAKE_NCCL_VERSION, by default 22809.
#pragma once

namespace fake {

int nccl_version();

}  // namespace fake
