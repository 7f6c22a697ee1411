// Exported functions of the stand-in for libcuda.so.1: errors, devices, contexts, memory.
#include <cstdio>
#include <cstring>
#include <utility>

#include "cuda_call.h"

using namespace sparkhvd::nccl;
using fake::current_device;
using fake::Device;
using fake::driver;
using fake::driver_call;
using fake::faults;
using fake::Needs;
using fake::this_thread;
using fake::unsafe_call;

namespace {

constexpr int kDriverVersion = 13000;

struct ErrorName {
  CUresult result;
  const char* name;
  const char* text;
};

constexpr ErrorName kErrors[] = {
    {kCudaSuccess, "CUDA_SUCCESS", "no error"},
    {kCudaErrorInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kCudaErrorOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kCudaErrorNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kCudaErrorDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kCudaErrorNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kCudaErrorInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kCudaErrorInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kCudaErrorInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kCudaErrorNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kCudaErrorNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kCudaErrorNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kCudaErrorStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kCudaErrorStreamCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult error_text(CUresult result, const char** text, const char* ErrorName::* member) {
  for (const auto& error : kErrors) {
    if (error.result != result) continue;
    *text = error.*member;
    return kCudaSuccess;
  }
  *text = nullptr;
  return kCudaErrorInvalidValue;
}

Device* find_device(CUdevice ordinal) {
  const auto& devices = driver().devices;
  const auto index = static_cast<std::size_t>(ordinal);
  return ordinal >= 0 && index < devices.size() ? devices[index].get() : nullptr;
}

CUcontext to_context(Device* device) { return reinterpret_cast<CUcontext>(device); }
Device* to_device(CUcontext context) { return reinterpret_cast<Device*>(context); }

template <class Body>
CUresult device_call(const char* name, CUdevice ordinal, Body body) {
  return driver_call(name, Needs::kInit, [&] {
    Device* device = find_device(ordinal);
    return device != nullptr ? body(*device) : kCudaErrorInvalidDevice;
  });
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned flags) {
  return driver_call("cuInit", Needs::kNothing, [&] {
    if (flags != 0) return kCudaErrorInvalidValue;
    if (driver().devices.empty()) return kCudaErrorNoDevice;
    driver().is_initialized = true;
    return kCudaSuccess;
  });
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  return error_text(result, name, &ErrorName::name);
}

CUresult cuGetErrorString(CUresult result, const char** text) {
  return error_text(result, text, &ErrorName::text);
}

CUresult cuDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return kCudaSuccess;
}

CUresult cuDeviceGetCount(int* count) {
  return driver_call("cuDeviceGetCount", Needs::kInit, [&] {
    *count = static_cast<int>(driver().devices.size());
    return kCudaSuccess;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return device_call("cuDeviceGet", ordinal, [&](Device&) {
    *device = ordinal;
    return kCudaSuccess;
  });
}

CUresult cuDeviceGetName(char* name, int size, CUdevice ordinal) {
  return device_call("cuDeviceGetName", ordinal, [&](Device& device) {
    std::snprintf(name, static_cast<std::size_t>(size), "fake GPU %d", device.index);
    return kCudaSuccess;
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  return device_call("cuDeviceGetUuid", ordinal, [&](Device& device) {
    *uuid = device.uuid;
    return kCudaSuccess;
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
  return cuDeviceGetUuid(uuid, ordinal);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  return device_call("cuDevicePrimaryCtxRetain", ordinal, [&](Device& device) {
    ++device.retained;
    *context = to_context(&device);
    return kCudaSuccess;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  return device_call("cuDevicePrimaryCtxRelease", ordinal, [&](Device& device) {
    if (device.retained <= 0) {
      faults().misuse("cuDevicePrimaryCtxRelease of a context that is not retained");
      return kCudaErrorInvalidContext;
    }
    --device.retained;
    return kCudaSuccess;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return driver_call("cuCtxPushCurrent", Needs::kInit, [&] {
    if (context == nullptr) return kCudaErrorInvalidContext;
    this_thread().contexts.push_back(to_device(context));
    return kCudaSuccess;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  return driver_call("cuCtxPopCurrent", Needs::kInit, [&] {
    auto& contexts = this_thread().contexts;
    if (contexts.empty()) return kCudaErrorInvalidContext;
    if (context != nullptr) *context = to_context(contexts.back());
    contexts.pop_back();
    return kCudaSuccess;
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return driver_call("cuCtxSetCurrent", Needs::kInit, [&] {
    auto& contexts = this_thread().contexts;
    if (!contexts.empty()) contexts.pop_back();
    if (context != nullptr) contexts.push_back(to_device(context));
    return kCudaSuccess;
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return driver_call("cuCtxGetCurrent", Needs::kInit, [&] {
    *context = to_context(current_device());
    return kCudaSuccess;
  });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return driver_call("cuThreadExchangeStreamCaptureMode", Needs::kNothing, [&] {
    std::swap(*mode, this_thread().capture_mode);
    return kCudaSuccess;
  });
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  return unsafe_call("cuMemAlloc", [&] {
    if (bytes == 0) return kCudaErrorInvalidValue;
    *address = driver().allocate(*current_device(), bytes, false);
    return kCudaSuccess;
  });
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return unsafe_call("cuMemFree", [&] {
    if (address == 0) return kCudaSuccess;
    const auto allocation = driver().find(address);
    if (!allocation || allocation->can_be_registered) return kCudaErrorInvalidValue;
    // As on a GPU, it waits for all work of the device, even for a collective that spins for a peer.
    for (const auto& stream : allocation->device->streams()) stream->wait(stream->position());
    return driver().free(address) ? kCudaSuccess : kCudaErrorInvalidValue;
  });
}

CUresult cuPointerGetAttribute(void* value, CUpointerAttribute attribute, CUdeviceptr address) {
  return driver_call("cuPointerGetAttribute", Needs::kContext, [&] {
    const auto allocation = driver().find(address);
    if (!allocation) return kCudaErrorInvalidValue;
    const auto& devices = driver().devices;
    switch (attribute) {
      case CUpointerAttribute::kContext:
        *static_cast<CUcontext*>(value) = to_context(allocation->device);
        return kCudaSuccess;
      case CUpointerAttribute::kMemoryType:
        *static_cast<unsigned*>(value) = kCudaMemoryTypeDevice;
        return kCudaSuccess;
      case CUpointerAttribute::kDeviceOrdinal:
        for (std::size_t i = 0; i < devices.size(); ++i) {
          if (devices[i].get() == allocation->device)
            *static_cast<int*>(value) = static_cast<int>(i);
        }
        return kCudaSuccess;
    }
    return kCudaErrorInvalidValue;
  });
}

}  // extern "C"
