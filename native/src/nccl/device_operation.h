// Additional state of an operation on the device.
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

/// A caller's registered memory of a device. When the caller releases it, the plane's thread deregisters it from NCCL,
/// if the thread still runs.
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

  /// Makes `stream` wait for the end of the operation. False if it has not been launched. Any thread may call it.
  bool let_wait(std::uint64_t stream, const std::string& label) const;

  std::shared_ptr<Device> device;
  std::vector<Tensor> tensors;  // their shapes are in the operation's descriptor
  Event ready;                  // recorded behind the caller's pending work at the submission
  Event done;                   // recorded behind the operation; valid after `is_launched`
  std::atomic<bool> is_launched{false};
  bool is_with_plane = false;  // only the driver's thread uses it
  // True if a deadline has ended the operation: the device may still use the tensors. Written before the operation
  // ends.
  bool is_left_to_device = false;
  std::shared_ptr<DeviceBuffer> buffer;  // the memory, after a registration has finished
};

/// True if the operation has been launched on the device. Any thread may call it.
inline bool is_launched(const Operation& operation) noexcept {
  return operation.on_device && operation.on_device->is_launched.load(std::memory_order_acquire);
}

/// A negotiated operation, for the plane's thread.
struct Launch {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;
  std::vector<Rank> ranks;                // ranks of the process set, ascending
  std::size_t index = 0;                  // index of this rank in `ranks`
  std::vector<std::int64_t> rows;         // rows of the order
  std::shared_ptr<Operation> operation;   // null: this rank has joined and contributes zeros
  std::optional<Descriptor> passed_over;  // if this rank has joined: description of the operation
  std::optional<NcclUniqueId> unique_id;  // only with the set's first order: its communicator's id

  const Descriptor& descriptor() const {
    return operation ? operation->descriptor : passed_over.value();
  }
};

}  // namespace sparkhvd::nccl
