#include "nccl/device.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>

#include "error.h"

namespace sparkhvd::nccl {
namespace {

std::atomic<unsigned> forks{0};

/// Number of forks between the process that loaded the library and this process. It is read several times per
/// operation; getpid() would make a system call each time.
unsigned generation() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  if (registered != 0) throw Error(SPARKHVD_INTERNAL, "no memory for a handler of forks");
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

Device::Device(const DeviceOptions& options)
    : ordinal_(options.ordinal),
      generation_(generation()),
      cuda_(CudaApi::load(options.cuda_library)),
      nccl_(NcclApi::load(options.nccl)) {
  int count = 0;
  cuda_->check(cuda_->cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal_ < 0 || ordinal_ >= count) {
    throw Error(SPARKHVD_UNSUPPORTED,
                "device " + std::to_string(ordinal_) + " does not exist: the CUDA driver shows " +
                    std::to_string(count) + " to this process. Look at CUDA_VISIBLE_DEVICES.");
  }
  cuda_->check(cuda_->cuDeviceGet(&device_, ordinal_), "cuDeviceGet");
  cuda_->check(cuda_->cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    start();
  } catch (...) {
    cuda_->cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

void Device::start() {
  const CurrentContext current(*cuda_, context_);
  int least = 0;
  int greatest = 0;
  cuda_->check(cuda_->cuCtxGetStreamPriorityRange(&least, &greatest),
               "cuCtxGetStreamPriorityRange");
  // The greatest priority, because other ranks wait for this rank's data, while its own computation can catch up.
  cuda_->check(cuda_->cuStreamCreateWithPriority(&stream_, kCudaStreamNonBlocking, greatest),
               "cuStreamCreateWithPriority");
}

Device::~Device() {
  if (!is_mine()) return;
  try {
    {
      const CurrentContext current(*cuda_, context_);
      const RelaxedCapture relaxed(*cuda_);
      for (const CUevent event : events_) cuda_->cuEventDestroy(event);
      cuda_->cuStreamDestroy(stream_);
    }
    cuda_->cuDevicePrimaryCtxRelease(device_);
  } catch (const Error&) {  // the driver has ended before and has freed its resources
  }
}

bool Device::is_mine() const noexcept {
  return forks.load(std::memory_order_relaxed) == generation_;
}

CUevent Device::take_event() {
  {
    const Lock lock(mutex_);
    if (!events_.empty()) {
      const CUevent event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  const CurrentContext current(*cuda_, context_);
  const RelaxedCapture relaxed(*cuda_);
  CUevent event = nullptr;
  cuda_->check(cuda_->cuEventCreate(&event, kCudaEventDisableTiming), "cuEventCreate");
  return event;
}

void Device::give_event(CUevent event) noexcept {
  if (!is_mine()) return;  // in a forked child, where the lock may be held forever
  try {
    const Lock lock(mutex_);
    events_.push_back(event);
  } catch (const std::bad_alloc&) {  // the event leaks until the process ends
  }
}

void Device::refuse_capture(CUstream stream, const std::string& label) const {
  CUstreamCaptureStatus status = CUstreamCaptureStatus::kNone;
  const CUresult result = cuda_->cuStreamIsCapturing(stream, &status);
  // The query of the legacy stream fails with this code while a stream that synchronizes with it is captured.
  constexpr CUresult kCaptureImplicit = 906;
  if (result != kCaptureImplicit) {
    cuda_->check(result, "cuStreamIsCapturing");
    if (status == CUstreamCaptureStatus::kNone) return;
  }
  throw Error(
      SPARKHVD_INVALID_ARGUMENT,
      label +
          ": its stream is being captured into a CUDA graph, and the ranks agree on an "
          "operation each time, which a graph cannot do. For a whole training step, run the "
          "step outside of the capture.");
}

DeviceMemory::DeviceMemory(std::shared_ptr<Device> device, std::size_t bytes)
    : device_(std::move(device)), bytes_(bytes) {
  const NcclApi& nccl = device_->nccl();
  void* memory = nullptr;
  std::string why;
  if (nccl.ncclMemAlloc != nullptr && nccl.ncclMemFree != nullptr) {
    const auto result = nccl.ncclMemAlloc(&memory, bytes);
    is_nccls_ = result == NcclResult::kSuccess && memory != nullptr;
    if (!is_nccls_) why = nccl.describe(result, "ncclMemAlloc") + " ";
  }
  if (!is_nccls_) {
    CUdeviceptr address = 0;
    const CUresult result = device_->cuda().cuMemAlloc(&address, bytes);
    if (result != kCudaSuccess) {
      throw Error(SPARKHVD_UNSUPPORTED,
                  "device " + std::to_string(ordinal()) + " has no " + std::to_string(bytes) +
                      " bytes of memory left. " + why +
                      "cuMemAlloc failed: " + device_->cuda().describe(result) + ".");
    }
    memory = reinterpret_cast<void*>(address);
  }
  data_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr || !device_->is_mine()) return;
  try {
    const CurrentContext current(device_->cuda(), device_->context());
    const RelaxedCapture relaxed(device_->cuda());
    if (is_nccls_) {
      device_->nccl().ncclMemFree(data_);
    } else {
      device_->cuda().cuMemFree(reinterpret_cast<CUdeviceptr>(data_));
    }
  } catch (const Error&) {  // the driver has ended before and has freed its memory
  }
}

}  // namespace sparkhvd::nccl
