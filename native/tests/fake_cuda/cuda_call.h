// Checks that every function of the stand-in for libcuda does first.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "device.h"
#include "faults.h"

namespace fake {

enum class Needs { kNothing, kInit, kContext };

/// Runs `body` unless a rule of the test or a condition of CUDA forbids it.
template <class Body>
CUresult driver_call(const char* name, Needs needs, Body body) noexcept {
  using namespace sparkhvd::nccl;
  try {
    const Verdict verdict = faults().enter(name);
    if (verdict.result) return *verdict.result;
    this_thread().is_wait_skipped = verdict.is_skipped;
    if (this_thread().is_in_host_function) {
      faults().misuse(std::string(name) + " inside a host function of a stream");
      return kCudaErrorNotPermitted;
    }
    if (needs != Needs::kNothing && !driver().is_initialized) return kCudaErrorNotInitialized;
    if (needs == Needs::kContext) {
      const Device* device = current_device();
      if (device == nullptr) return kCudaErrorInvalidContext;
      if (device->retained <= 0) {
        faults().misuse(std::string(name) + " in a primary context that is not retained");
        return kCudaErrorInvalidContext;
      }
    }
    return body();
  } catch (const std::bad_alloc&) {
    return kCudaErrorOutOfMemory;
  } catch (const std::exception& error) {
    faults().misuse(std::string(name) + ": " + error.what());
    return 999;  // CUDA_ERROR_UNKNOWN
  }
}

/// Does the same for calls that CUDA refuses as potentially unsafe while a graph is captured.
template <class Body>
CUresult unsafe_call(const char* name, Body body) noexcept {
  return driver_call(name, Needs::kContext, [&] {
    const CUresult allowed = driver().check_capture();
    return allowed == sparkhvd::nccl::kCudaSuccess ? body() : allowed;
  });
}

}  // namespace fake
