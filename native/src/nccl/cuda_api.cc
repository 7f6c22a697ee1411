#include "nccl/cuda_api.h"

#include <vector>

#include "error.h"

namespace sparkhvd::nccl {

namespace {

constexpr auto kDriver = "libcuda.so.1";

/// Sets all function pointers and returns the names that the library lacks. Some symbols have a suffix with their
/// version, such as _v2; cuda.h hides it behind macros with the plain names.
std::vector<std::string> bind_all(CudaApi& api) {
  std::vector<std::string> missing;
  const auto require = [&](const char* symbol, auto*& function) {
    if (!bind(api.library, symbol, function)) missing.emplace_back(symbol);
  };
  require("cuInit", api.cuInit);
  require("cuGetErrorName", api.cuGetErrorName);
  require("cuGetErrorString", api.cuGetErrorString);
  require("cuDeviceGet", api.cuDeviceGet);
  require("cuDeviceGetCount", api.cuDeviceGetCount);
  if (!bind(api.library, "cuDeviceGetUuid_v2", api.cuDeviceGetUuid)) {
    require("cuDeviceGetUuid", api.cuDeviceGetUuid);
  }
  require("cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain);
  require("cuDevicePrimaryCtxRelease_v2", api.cuDevicePrimaryCtxRelease);
  require("cuCtxPushCurrent_v2", api.cuCtxPushCurrent);
  require("cuCtxPopCurrent_v2", api.cuCtxPopCurrent);
  require("cuCtxSetCurrent", api.cuCtxSetCurrent);
  require("cuCtxGetStreamPriorityRange", api.cuCtxGetStreamPriorityRange);
  require("cuStreamCreateWithPriority", api.cuStreamCreateWithPriority);
  require("cuStreamDestroy_v2", api.cuStreamDestroy);
  require("cuStreamWaitEvent", api.cuStreamWaitEvent);
  require("cuStreamSynchronize", api.cuStreamSynchronize);
  require("cuStreamQuery", api.cuStreamQuery);
  require("cuStreamIsCapturing", api.cuStreamIsCapturing);
  require("cuThreadExchangeStreamCaptureMode", api.cuThreadExchangeStreamCaptureMode);
  require("cuLaunchHostFunc", api.cuLaunchHostFunc);
  require("cuEventCreate", api.cuEventCreate);
  require("cuEventRecord", api.cuEventRecord);
  require("cuEventQuery", api.cuEventQuery);
  require("cuEventDestroy_v2", api.cuEventDestroy);
  require("cuMemAlloc_v2", api.cuMemAlloc);
  require("cuMemFree_v2", api.cuMemFree);
  require("cuMemsetD8Async", api.cuMemsetD8Async);
  require("cuMemcpyDtoDAsync_v2", api.cuMemcpyDtoDAsync);
  require("cuMemcpyHtoDAsync_v2", api.cuMemcpyHtoDAsync);
  require("cuMemcpyDtoHAsync_v2", api.cuMemcpyDtoHAsync);
  require("cuPointerGetAttribute", api.cuPointerGetAttribute);
  return missing;
}

}  // namespace

std::shared_ptr<const CudaApi> CudaApi::load(const std::string& library) {
  const std::string name = library.empty() ? kDriver : library;
  auto api = std::make_shared<CudaApi>();
  try {
    api->library = Library::open(name);
  } catch (const Error& error) {
    throw Error(SPARKHVD_UNSUPPORTED, "The CUDA driver's library " + name +
                                          " cannot be loaded: " + error.what() +
                                          ". GPUs need NVIDIA's driver on the host.");
  }
  if (const auto missing = bind_all(*api); !missing.empty()) {
    throw Error(SPARKHVD_UNSUPPORTED, "The CUDA driver's library " + name + " has no " +
                                          list_of(missing) +
                                          ". Update NVIDIA's driver: the engine needs one of "
                                          "CUDA 11 or newer.");
  }
  if (const CUresult result = api->cuInit(0); result != kCudaSuccess) {
    throw Error(SPARKHVD_UNSUPPORTED, "The CUDA driver cannot be used: cuInit answered " +
                                          api->describe(result) +
                                          ". Look at nvidia-smi and CUDA_VISIBLE_DEVICES.");
  }
  return api;
}

std::string CudaApi::describe(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != kCudaSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  std::string description = name + std::string(" (") + std::to_string(result);
  if (cuGetErrorString(result, &text) == kCudaSuccess && text != nullptr) {
    description += std::string(": ") + text;
  }
  return description + ")";
}

void CudaApi::check(CUresult result, std::string_view call) const {
  if (result == kCudaSuccess) return;
  throw Error(SPARKHVD_INTERNAL, std::string(call) + " failed: " + describe(result) + ".");
}

CurrentContext::CurrentContext(const CudaApi& cuda, CUcontext context) : cuda_(cuda) {
  cuda.check(cuda.cuCtxPushCurrent(context), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  cuda_.cuCtxPopCurrent(&popped);
}

RelaxedCapture::RelaxedCapture(const CudaApi& cuda) : cuda_(cuda) {
  cuda.check(cuda.cuThreadExchangeStreamCaptureMode(&before_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() { cuda_.cuThreadExchangeStreamCaptureMode(&before_); }

}  // namespace sparkhvd::nccl
