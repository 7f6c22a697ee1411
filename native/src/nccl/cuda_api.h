// The functions of the CUDA driver (libcuda.so.1) that the engine calls, found at run time.
//
// The engine uses the driver API and not the runtime API: its soname has not changed since CUDA 1, and it works with
// CUDA 12 and 13. Both APIs share the primary context of a device, which torch and NCCL also use. The names here are
// the driver's own, so that its documentation can be searched.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "nccl/library.h"

namespace sparkhvd::nccl {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUhostFn = void (*)(void* data);

struct CUuuid {
  std::array<unsigned char, 16> bytes;
};

// Results that the code checks by name. For messages the driver provides the names of all results.
inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaErrorInvalidValue = 1;
inline constexpr CUresult kCudaErrorOutOfMemory = 2;
inline constexpr CUresult kCudaErrorNotInitialized = 3;
inline constexpr CUresult kCudaErrorDeinitialized = 4;
inline constexpr CUresult kCudaErrorNoDevice = 100;
inline constexpr CUresult kCudaErrorInvalidDevice = 101;
inline constexpr CUresult kCudaErrorInvalidContext = 201;
inline constexpr CUresult kCudaErrorInvalidHandle = 400;
inline constexpr CUresult kCudaErrorNotReady = 600;
inline constexpr CUresult kCudaErrorNotPermitted = 800;
inline constexpr CUresult kCudaErrorNotSupported = 801;
inline constexpr CUresult kCudaErrorStreamCaptureUnsupported = 900;
inline constexpr CUresult kCudaErrorStreamCaptureInvalidated = 901;

inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;

enum class CUstreamCaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CUstreamCaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CUpointerAttribute : int { kContext = 1, kMemoryType = 2, kDeviceOrdinal = 9 };
inline constexpr unsigned kCudaMemoryTypeDevice = 2;

/// Functions of the driver. After `load` no pointer is null. All functions except the first group need a current
/// context.
struct CudaApi {
  CUresult (*cuInit)(unsigned flags) = nullptr;
  CUresult (*cuGetErrorName)(CUresult, const char** name) = nullptr;
  CUresult (*cuGetErrorString)(CUresult, const char** text) = nullptr;
  CUresult (*cuDeviceGet)(CUdevice*, int ordinal) = nullptr;
  CUresult (*cuDeviceGetCount)(int* count) = nullptr;
  CUresult (*cuDeviceGetUuid)(CUuuid*,
                              CUdevice) = nullptr;  // _v2 if available, for the UUID of a MIG slice
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice) = nullptr;
  CUresult (*cuCtxPushCurrent)(CUcontext) = nullptr;
  CUresult (*cuCtxPopCurrent)(CUcontext*) = nullptr;
  CUresult (*cuCtxSetCurrent)(CUcontext) = nullptr;

  CUresult (*cuCtxGetStreamPriorityRange)(int* least, int* greatest) = nullptr;
  CUresult (*cuStreamCreateWithPriority)(CUstream*, unsigned flags, int priority) = nullptr;
  CUresult (*cuStreamDestroy)(CUstream) = nullptr;
  CUresult (*cuStreamWaitEvent)(CUstream, CUevent, unsigned flags) = nullptr;
  CUresult (*cuStreamSynchronize)(CUstream) = nullptr;
  CUresult (*cuStreamQuery)(CUstream) = nullptr;
  CUresult (*cuStreamIsCapturing)(CUstream, CUstreamCaptureStatus*) = nullptr;
  CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode*) = nullptr;
  CUresult (*cuLaunchHostFunc)(CUstream, CUhostFn, void* data) = nullptr;

  CUresult (*cuEventCreate)(CUevent*, unsigned flags) = nullptr;
  CUresult (*cuEventRecord)(CUevent, CUstream) = nullptr;
  CUresult (*cuEventQuery)(CUevent) = nullptr;
  CUresult (*cuEventDestroy)(CUevent) = nullptr;

  CUresult (*cuMemAlloc)(CUdeviceptr*, std::size_t bytes) = nullptr;
  CUresult (*cuMemFree)(CUdeviceptr) = nullptr;
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char value, std::size_t bytes,
                              CUstream) = nullptr;
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                CUstream) = nullptr;
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void* from, std::size_t bytes,
                                CUstream) = nullptr;
  CUresult (*cuMemcpyDtoHAsync)(void* to, CUdeviceptr from, std::size_t bytes, CUstream) = nullptr;
  CUresult (*cuPointerGetAttribute)(void* value, CUpointerAttribute, CUdeviceptr) = nullptr;

  /// Loads the driver and calls cuInit. `library`: a path or soname; empty: libcuda.so.1. Throws
  /// Error(SPARKHVD_UNSUPPORTED) if there is no driver or device, or if an old driver lacks a function.
  static std::shared_ptr<const CudaApi> load(const std::string& library = {});

  /// Text of a result: "CUDA_ERROR_NOT_READY (600: device not ready)".
  std::string describe(CUresult result) const;

  /// Throws Error(SPARKHVD_INTERNAL) unless `result` is success. `call`: name of the driver's function that returned
  /// it.
  void check(CUresult result, std::string_view call) const;

  Library library;
};

/// Makes `context` the thread's current context for a scope, and then restores the previous context.
class CurrentContext {
 public:
  CurrentContext(const CudaApi& cuda, CUcontext context);
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext();

 private:
  const CudaApi& cuda_;
};

/// Lets the thread query events for a scope while another thread captures a graph in global mode. Otherwise CUDA would
/// refuse the query and invalidate that capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaApi& cuda);
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  const CudaApi& cuda_;
  CUstreamCaptureMode before_ = CUstreamCaptureMode::kRelaxed;
};

}  // namespace sparkhvd::nccl
