// One GPU of this process: the primary context, a private stream, events and memory.
//
// **Threads.** Any thread may use it. The pool of events has its own lock; everything else is set only once.
//
// **Ownership.** The plane, operations (for their events) and device memory share a Device. They may outlive the
// engine, and the last owner releases the context.
//
// **Fork.** A forked child never calls CUDA, so it does not free resources; they end with its process.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nccl/cuda_api.h"
#include "nccl/nccl_api.h"
#include "sync.h"

namespace sparkhvd::nccl {

struct DeviceOptions {
  int ordinal = 0;
  std::string cuda_library;
  NcclSearch nccl;
};

class Device {
 public:
  /// Loads the libraries and starts the device. Throws UNSUPPORTED or INTERNAL with the reason.
  explicit Device(const DeviceOptions& options);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  int ordinal() const noexcept { return ordinal_; }
  const CudaApi& cuda() const noexcept { return *cuda_; }
  const NcclApi& nccl() const noexcept { return *nccl_; }
  CUcontext context() const noexcept { return context_; }
  /// The stream for all NCCL work on this device, in one order.
  CUstream stream() const noexcept { return stream_; }
  /// False in a forked child.
  bool is_mine() const noexcept;

  CUevent take_event();
  void give_event(CUevent event) noexcept;

  /// Throws INVALID_ARGUMENT with `label` if the stream is being captured into a graph.
  void refuse_capture(CUstream stream, const std::string& label) const;

 private:
  void start();

  const int ordinal_;
  const unsigned generation_;
  std::shared_ptr<const CudaApi> cuda_;
  std::shared_ptr<const NcclApi> nccl_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  Mutex mutex_;
  std::vector<CUevent> events_ GUARDED_BY(mutex_);  // events that are not in use
};

/// An event of the device's pool. The destructor returns it to the pool.
class Event {
 public:
  Event() noexcept = default;
  explicit Event(std::shared_ptr<Device> device)
      : device_(std::move(device)), event_(device_->take_event()) {}
  Event(Event&& other) noexcept
      : device_(std::move(other.device_)), event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    return *this;
  }
  Event(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) device_->give_event(event_);
  }

  CUevent get() const noexcept { return event_; }
  explicit operator bool() const noexcept { return event_ != nullptr; }

 private:
  std::shared_ptr<Device> device_;
  CUevent event_ = nullptr;
};

/// Memory of a device. It comes from ncclMemAlloc if the version of NCCL has it, because NCCL can register only such
/// memory.
class DeviceMemory {
 public:
  /// Allocates memory. Throws UNSUPPORTED if there is not enough. The device's context must be current.
  DeviceMemory(std::shared_ptr<Device> device, std::size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  /// Frees the memory; any thread may call it.
  ~DeviceMemory();

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  int ordinal() const noexcept { return device_->ordinal(); }
  bool is_mine() const noexcept { return device_->is_mine(); }
  bool can_be_registered() const noexcept { return is_nccls_; }

 private:
  std::shared_ptr<Device> device_;
  std::size_t bytes_;
  std::byte* data_ = nullptr;
  bool is_nccls_ = false;
};

}  // namespace sparkhvd::nccl
