// The conditions that callers wait for: the end or the launch of an operation.
#pragma once

#include <chrono>

#include "clock.h"
#include "engine/driver.h"
#include "nccl/device_operation.h"
#include "operation.h"

namespace sparkhvd {

/// Time for which a waiting thread polls only the launch of its operation.
inline constexpr auto kLaunchTime = std::chrono::microseconds(20);

/// Holds when the operation has ended.
class Ended final : public WaitCondition {
 public:
  explicit Ended(const Operation& operation) : operation_(operation) {}
  bool is_reached() const override { return operation_.is_finished(); }

 private:
  const Operation& operation_;
};

/// Holds when the operation has ended, or is launched on the device. The device plane's thread launches a negotiated
/// operation within a few microseconds, so polling is worthwhile.
class Launched final : public WaitCondition {
 public:
  Launched(const Operation& operation, bool has_cpu_for_plane)
      : operation_(operation), has_cpu_for_plane_(has_cpu_for_plane) {}
  bool is_reached() const override {
    return operation_.is_finished() || nccl::is_launched(operation_);
  }
  bool is_imminent() const override {
    return has_cpu_for_plane_ && operation_.on_device->is_with_plane;
  }
  /// Polls for the launch, and yields between polls, because another program may have taken the CPU of the plane's
  /// thread. It polls only kLaunchTime: such a program may keep the CPU for milliseconds.
  bool await() const override {
    const TimePoint end = Clock::now() + kLaunchTime;
    do {
      if (nccl::is_launched(operation_)) return true;
      relax(true);
    } while (Clock::now() < end);
    return nccl::is_launched(operation_);
  }

 private:
  const Operation& operation_;
  const bool has_cpu_for_plane_;
};

}  // namespace sparkhvd
