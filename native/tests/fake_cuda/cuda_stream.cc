// Exported functions of the stand-in for libcuda.so.1: streams, events, copies and host functions; and captures, for
// tests.
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_call.h"
#include "fake_cuda.h"

using namespace sparkhvd::nccl;
using fake::current_device;
using fake::driver;
using fake::driver_call;
using fake::Needs;
using fake::this_thread;
using fake::unsafe_call;

namespace {

constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

/// After a skipped wait, the stream that should have been waited for is held for this time. It is much longer than the
/// waiting stream needs, although the items of that stream are delayed too.
std::chrono::microseconds hold_of_skipped_wait() {
  return std::max(std::chrono::microseconds(50'000),
                  10 * std::chrono::microseconds(fake::faults().stream_delay_us()));
}

using Streams = std::shared_ptr<fake::Stream>;

template <class Body>
CUresult stream_call(const char* name, CUstream handle, Body body) {
  return driver_call(name, Needs::kContext, [&] {
    const Streams stream = driver().find_stream(handle);
    return stream != nullptr ? body(stream) : kCudaErrorInvalidHandle;
  });
}

template <class Body>
CUresult event_call(const char* name, CUevent handle, Body body) {
  return driver_call(name, Needs::kContext, [&] {
    const auto event = driver().find_event(handle);
    return event != nullptr ? body(*event) : kCudaErrorInvalidHandle;
  });
}

/// Queues `item` on a stream, for the driver's function `name`.
CUresult queue(const char* name, CUstream handle, std::function<void()> item) {
  return stream_call(name, handle, [&](const Streams& stream) {
    fake::check_confirmed(*stream, name);
    fake::submit(stream, std::move(item));
    return kCudaSuccess;
  });
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

std::pair<Streams, fake::Stream::Position> recorded(fake::Event& event) {
  const std::scoped_lock lock(event.mutex);
  return {event.stream, event.position};
}

}  // namespace

extern "C" {

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return driver_call("cuCtxGetStreamPriorityRange", Needs::kContext, [&] {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return kCudaSuccess;
  });
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  return driver_call("cuStreamCreateWithPriority", Needs::kContext, [&] {
    const bool syncs_with_legacy = (flags & kCudaStreamNonBlocking) == 0;
    *stream = static_cast<CUstream>(driver().add_stream(*current_device(), syncs_with_legacy));
    return kCudaSuccess;
  });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  return driver_call("cuStreamDestroy", Needs::kContext, [&] {
    return driver().remove_stream(stream) ? kCudaSuccess : kCudaErrorInvalidHandle;
  });
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
  return event_call("cuStreamWaitEvent", event, [&](fake::Event& found) {
    const Streams stream = driver().find_stream(handle);
    if (stream == nullptr) return kCudaErrorInvalidHandle;
    fake::check_confirmed(*stream, "cuStreamWaitEvent");
    const auto [other, position] = recorded(found);
    if (other == nullptr) return kCudaSuccess;
    if (!this_thread().is_wait_skipped) {
      stream->submit_wait(other, position);
    } else if (!other->has_reached(position)) {
      other->hold(hold_of_skipped_wait());  // so that the stream without the wait comes first
    }
    return kCudaSuccess;
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return unsafe_call("cuStreamSynchronize", [&] {
    const Streams stream = driver().find_stream(handle);
    if (stream == nullptr) return kCudaErrorInvalidHandle;
    fake::submit(stream, [] {});  // makes the legacy stream wait for the streams that sync with it
    stream->wait(stream->position());
    return kCudaSuccess;
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return unsafe_call("cuStreamQuery", [&] {
    const Streams stream = driver().find_stream(handle);
    if (stream == nullptr) return kCudaErrorInvalidHandle;
    return stream->has_reached(stream->position()) ? kCudaSuccess : kCudaErrorNotReady;
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return stream_call("cuStreamIsCapturing", handle, [&](const Streams& stream) {
    *status = !stream->is_capturing ? CUstreamCaptureStatus::kNone
              : stream->is_spoilt   ? CUstreamCaptureStatus::kInvalidated
                                    : CUstreamCaptureStatus::kActive;
    return kCudaSuccess;
  });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return queue("cuLaunchHostFunc", stream, [function, data] {
    this_thread().is_in_host_function = true;
    function(data);
    this_thread().is_in_host_function = false;
  });
}

CUresult cuEventCreate(CUevent* event, unsigned) {
  return driver_call("cuEventCreate", Needs::kContext, [&] {
    *event = static_cast<CUevent>(driver().add_event());
    return kCudaSuccess;
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return driver_call("cuEventDestroy", Needs::kContext, [&] {
    return driver().remove_event(event) ? kCudaSuccess : kCudaErrorInvalidHandle;
  });
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return event_call("cuEventRecord", handle, [&](fake::Event& event) {
    const Streams stream = driver().find_stream(stream_handle);
    if (stream == nullptr) return kCudaErrorInvalidHandle;
    fake::check_confirmed(*stream, "cuEventRecord");
    // Records behind a separate item: on the legacy stream it also waits for the streams that sync with it.
    const auto position = fake::submit(stream, [] {});
    const std::scoped_lock lock(event.mutex);
    event.stream = stream;
    event.position = position;
    return kCudaSuccess;
  });
}

CUresult cuEventQuery(CUevent handle) {
  return unsafe_call("cuEventQuery", [&] {
    const auto event = driver().find_event(handle);
    if (event == nullptr) return kCudaErrorInvalidHandle;
    const auto [stream, position] = recorded(*event);
    return stream == nullptr || stream->has_reached(position) ? kCudaSuccess : kCudaErrorNotReady;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return unsafe_call("cuEventSynchronize", [&] {
    const auto event = driver().find_event(handle);
    if (event == nullptr) return kCudaErrorInvalidHandle;
    const auto [stream, position] = recorded(*event);
    if (stream != nullptr) stream->wait(position);
    return kCudaSuccess;
  });
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t bytes,
                         CUstream stream) {
  return queue("cuMemsetD8Async", stream, [=] { std::memset(pointer(address), value, bytes); });
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return queue("cuMemcpyAsync", stream, [=] { std::memmove(pointer(to), pointer(from), bytes); });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                              CUstream stream) {
  return queue("cuMemcpyDtoDAsync", stream,
               [=] { std::memmove(pointer(to), pointer(from), bytes); });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes,
                              CUstream stream) {
  // As in CUDA, pageable memory is copied before the call returns.
  const auto* start = static_cast<const unsigned char*>(from);
  auto staged = std::make_shared<std::vector<unsigned char>>(start, start + bytes);
  return queue("cuMemcpyHtoDAsync", stream,
               [=] { std::memcpy(pointer(to), staged->data(), bytes); });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return queue("cuMemcpyDtoHAsync", stream, [=] { std::memcpy(to, pointer(from), bytes); });
}

int fake_cuda_begin_capture(std::uint64_t stream) {
  return driver().begin_capture(reinterpret_cast<const void*>(stream));
}

int fake_cuda_end_capture(std::uint64_t stream) {
  return driver().end_capture(reinterpret_cast<const void*>(stream));
}

}  // extern "C"
