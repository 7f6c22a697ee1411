// State of an operation on the device, besides that of every operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "message.h"
#include "nccl/device.h"
#include "operation.h"
#include "types.h"

namespace sparkhvd::nccl {

class Requests;

/// A caller's registered memory of a device. When the caller releases it, the plane's thread, if alive,
/// deregisters it from NCCL.
class DeviceBuffer {
 public:
  DeviceBuffer(std::shared_ptr<DeviceMemory> memory, std::shared_ptr<Requests> plane)
      : memory_(std::move(memory)), plane_(std::move(plane)) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  const DeviceMemory& memory() const noexcept { return *memory_; }

 private:
  std::shared_ptr<DeviceMemory> memory_;
  std::shared_ptr<Requests> plane_;
};

struct OnDevice {
  struct Tensor {
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
  };

  explicit OnDevice(std::shared_ptr<Device> the_device) : device(std::move(the_device)) {}

  /// Makes `stream` wait for the end of the operation; false before its launch. Any thread.
  bool let_wait(std::uint64_t stream, const std::string& label) const;

  std::shared_ptr<Device> device;
  std::vector<Tensor> tensors;  // of the shapes in the operation's descriptor
  Event ready;                  // behind the caller's pending work at the submission
  Event done;                   // behind the operation, after `is_launched`
  std::atomic<bool> is_launched{false};
  bool is_with_plane = false;  // the driver's
  // Ended by a deadline: the device may use the tensors forever. Written before the operation ends.
  bool is_left_to_device = false;
  std::shared_ptr<DeviceBuffer> buffer;  // of a registration that has finished
};

/// True if the operation is launched on the device. Any thread.
inline bool is_launched(const Operation& operation) noexcept {
  return operation.on_device && operation.on_device->is_launched.load(std::memory_order_acquire);
}

/// A negotiated operation, for the plane's thread.
struct Launch {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;
  std::vector<Rank> ranks;                // of the process set, ascending
  std::size_t index = 0;                  // of this rank in it
  std::vector<std::int64_t> rows;         // as in the order
  std::shared_ptr<Operation> operation;   // null: this rank has joined, and contributes zeros
  std::optional<Descriptor> passed_over;  // then: the others' operation
  std::optional<NcclUniqueId> unique_id;  // with the first order: the id of its communicator

  const Descriptor& descriptor() const {
    return operation ? operation->descriptor : passed_over.value();
  }
};

}  // namespace sparkhvd::nccl
