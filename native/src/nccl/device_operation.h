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

/// The memory of a device that a caller has registered. When the caller lets go, the plane's thread
/// takes it back from NCCL, while there is one.
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

  /// Makes `stream` wait for the end of the operation, once that can be said: else false. Any thread.
  bool let_wait(std::uint64_t stream, const std::string& label) const;

  std::shared_ptr<Device> device;
  std::vector<Tensor> tensors;  // of the shapes in the operation's descriptor
  Event ready;                  // behind what the caller's stream had at the submission
  Event done;                   // behind the operation, once `is_launched`
  std::atomic<bool> is_launched{false};
  bool is_with_plane = false;  // the driver's
  // Ended by a deadline: the device may use the tensors for ever. Written before the operation ends.
  bool is_left_to_device = false;
  std::shared_ptr<DeviceBuffer> buffer;  // of a registration that has finished
};

/// True if the operation has been handed to the device. Any thread.
inline bool is_launched(const Operation& operation) noexcept {
  return operation.on_device && operation.on_device->is_launched.load(std::memory_order_acquire);
}

/// An operation that the ranks have agreed on, for the plane's thread.
struct Launch {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;
  std::vector<Rank> ranks;                // of the process set, ascending
  std::size_t index = 0;                  // of this rank in it
  std::vector<std::int64_t> rows;         // as in the order
  std::shared_ptr<Operation> operation;   // null: this rank has joined, and brings zeros
  std::optional<Descriptor> passed_over;  // then: what the others do
  std::optional<NcclUniqueId> unique_id;  // with the first order: what its communicator is made of

  const Descriptor& descriptor() const {
    return operation ? operation->descriptor : passed_over.value();
  }
};

}  // namespace sparkhvd::nccl
