// Streams, events, captures and registered memory.
#include <atomic>
#include <cstring>
#include <optional>
#include <string>

#include "nccl_conformity.h"

namespace sparkhvd::conformity {

namespace {

class Event {
 public:
  explicit Event(Rank& rank) : rank_(rank) {
    expect_ok(rank, rank.cuda.cuEventCreate(&handle_, kCudaEventDisableTiming), "cuEventCreate");
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { rank_.cuda.cuEventDestroy(handle_); }

  CUevent get() const { return handle_; }
  void record(CUstream stream) {
    expect_ok(rank_, rank_.cuda.cuEventRecord(handle_, stream), "cuEventRecord");
  }
  void hold(CUstream stream) {
    expect_ok(rank_, rank_.cuda.cuStreamWaitEvent(stream, handle_, 0), "cuStreamWaitEvent");
  }
  bool is_reached() {
    const CUresult result = rank_.cuda.cuEventQuery(handle_);
    if (result != kCudaErrorNotReady) expect_ok(rank_, result, "cuEventQuery");
    return result == kCudaSuccess;
  }

 private:
  Rank& rank_;
  CUevent handle_ = nullptr;
};

class Stream {
 public:
  explicit Stream(Rank& rank) : rank_(rank) {
    expect_ok(rank, rank.cuda.cuStreamCreateWithPriority(&handle_, kCudaStreamNonBlocking, 0),
              "cuStreamCreateWithPriority");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { rank_.cuda.cuStreamDestroy(handle_); }
  CUstream get() const { return handle_; }

 private:
  Rank& rank_;
  CUstream handle_ = nullptr;
};

/// Holds a stream until it is opened. The destructor opens it too.
class Gate {
 public:
  Gate(Rank& rank, CUstream stream) {
    const CUhostFn wait = [](void* data) {
      auto& open = *static_cast<std::atomic<bool>*>(data);
      open.wait(false);
    };
    expect_ok(rank, rank.cuda.cuLaunchHostFunc(stream, wait, &is_open_), "cuLaunchHostFunc");
    passed_.emplace(rank);
    passed_->record(stream);
  }
  ~Gate() {
    open();
    wait_until([&] { return passed_->is_reached(); }, "a stream that was held");
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() {
    is_open_ = true;
    is_open_.notify_all();
  }

 private:
  std::atomic<bool> is_open_ = false;
  std::optional<Event> passed_;
};

void events_are_places_in_a_stream(Rank& rank) {
  Stream stream(rank);
  Event event(rank);
  expect(event.is_reached(), "an event that was never recorded is not reached");
  event.record(stream.get());
  wait_until([&] { return event.is_reached(); }, "an event of an empty stream");
  Event later(rank);
  Event again(rank);
  Gate gate(rank, stream.get());
  expect(event.is_reached(), "what came after an event holds it");
  later.record(stream.get());
  expect(!later.is_reached(), "an event is reached before what comes before it");
  expect(rank.cuda.cuStreamQuery(stream.get()) == kCudaErrorNotReady, "the stream is not busy");
  again.record(rank.stream);
  wait_until([&] { return again.is_reached(); }, "another stream, which nothing holds");
  again.record(stream.get());
  expect(!again.is_reached(), "recording again does not move an event");
  gate.open();
  wait_until([&] { return later.is_reached() && again.is_reached(); }, "the events");
}

void a_wait_is_for_what_was_recorded_before_it(Rank& rank) {
  Stream producer(rank);
  Stream consumer(rank);
  Event event(rank);
  event.hold(consumer.get());  // never recorded: no wait
  Event free(rank);
  free.record(consumer.get());
  wait_until([&] { return free.is_reached(); }, "a stream that waits for an unrecorded event");
  Gate gate(rank, producer.get());
  event.record(producer.get());
  event.hold(consumer.get());
  event.record(rank.stream);  // does not take back the wait
  free.record(consumer.get());
  expect(!free.is_reached(), "a stream did not wait");
  gate.open();
  wait_until([&] { return free.is_reached(); }, "the stream that waited");
}

/// The default stream and streams without the flag NON_BLOCKING wait for each other.
void the_default_stream_waits_for_streams_that_are_not_free_of_it(Rank& rank) {
  CUstream tied = nullptr;
  expect_ok(rank, rank.cuda.cuStreamCreateWithPriority(&tied, 0, 0), "cuStreamCreateWithPriority");
  Stream other(rank);
  Event event(rank);
  Event free(rank);
  const CUstream legacy = nullptr;
  {
    Gate gate(rank, other.get());
    event.record(legacy);
    wait_until([&] { return event.is_reached(); }, "the default stream, which nothing holds");
  }
  {
    Gate gate(rank, tied);
    event.record(legacy);
    free.record(other.get());
    wait_until([&] { return free.is_reached(); }, "a stream that is free of the default one");
    expect(!event.is_reached(), "the default stream does not wait");
  }
  {
    Gate gate(rank, legacy);
    event.record(tied);
    expect(!event.is_reached(), "a stream does not wait for the default one");
  }
  wait_until([&] { return event.is_reached(); }, "the stream that waited");
  expect_ok(rank, rank.cuda.cuStreamDestroy(tied), "cuStreamDestroy");
}

/// Runs a step as the engine does it: from the caller's stream to the engine's stream and back, without waits on the
/// host. If the collective reads too early, or its result is copied too early, the numbers are wrong. True if they are
/// right.
bool overlapped_step_is_right(Rank& rank) {
  constexpr std::size_t kCount = 30'000;
  constexpr auto kType = NcclDataType::kInt32;
  Comm comm(rank);
  Stream mine(rank);
  Event ready(rank);
  Event reduced(rank);
  const Memory ones(rank, encode(std::vector<int>(kCount, 1), kType));
  const Memory data(rank, encode(std::vector<int>(kCount, 3), kType));
  const Memory sum(rank, encode(std::vector<int>(kCount, 5), kType));
  const Memory result(rank, encode(std::vector<int>(kCount, 7), kType));
  result.read();
  expect_ok(rank,
            rank.cuda.cuMemcpyDtoDAsync(data.address(), ones.address(), kCount * 4, rank.stream),
            "cuMemcpyDtoDAsync");
  ready.record(rank.stream);
  ready.hold(mine.get());
  comm.done(rank.nccl.ncclAllReduce(data.at(), sum.at(), kCount, kType, NcclOp::kSum, comm.get(),
                                    mine.get()),
            "ncclAllReduce");
  reduced.record(mine.get());
  reduced.hold(rank.stream);
  expect_ok(rank,
            rank.cuda.cuMemcpyDtoDAsync(result.address(), sum.address(), kCount * 4, rank.stream),
            "cuMemcpyDtoDAsync");
  const bool is_right = result.read() == encode(std::vector<int>(kCount, rank.size), kType);
  wait_until([&] { return rank.cuda.cuStreamQuery(mine.get()) == kCudaSuccess; }, "the stream");
  comm.destroy();
  return is_right;
}

void collectives_are_ordered_by_events(Rank& rank) {
  expect(overlapped_step_is_right(rank), "wrong result");
}

/// With the stand-in only: if either wait is skipped, the step gives wrong numbers.
void a_missing_wait_gives_wrong_data(Rank& rank) {
  for (const int skipped : {1, 2}) {
    rank.controls.stream_delay_us(20'000);  // longer than the host takes to call the wait
    rank.controls.skip_wait(skipped);
    const bool is_right = overlapped_step_is_right(rank);
    rank.controls.reset();
    expect(!is_right, "no result shows that wait " + std::to_string(skipped) + " is missing");
  }
}

void calls_without_a_context_are_refused(Rank& rank) {
  CUcontext popped = nullptr;
  expect_ok(rank, rank.cuda.cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
  CUdeviceptr memory = 0;
  const CUresult result = rank.cuda.cuMemAlloc(&memory, 16);
  expect_ok(rank, rank.cuda.cuCtxPushCurrent(popped), "cuCtxPushCurrent");
  expect(popped == rank.context, "another context was current");
  expect(result == kCudaErrorInvalidContext,
         "cuMemAlloc without a context: " + rank.cuda.describe(result));
}

/// Only one thread of the suite captures, because a capture in global mode affects all threads.
void a_query_spoils_a_capture_unless_it_is_relaxed(Rank& rank) {
  rank.room.barrier();
  if (rank.rank == 0) {
    Stream stream(rank);
    Event event(rank);
    event.record(rank.stream);
    rank.cuda.cuStreamSynchronize(rank.stream);
    const auto handle = reinterpret_cast<std::uint64_t>(stream.get());
    CUstreamCaptureStatus status{};
    expect_ok(rank, rank.controls.begin_capture(handle), "begin");
    expect_ok(rank, rank.cuda.cuStreamIsCapturing(stream.get(), &status), "cuStreamIsCapturing");
    expect(status == CUstreamCaptureStatus::kActive, "the stream is not capturing");
    {
      const RelaxedCapture relaxed(rank.cuda);
      expect(event.is_reached(), "the event of an empty stream");
    }
    expect_ok(rank, rank.controls.end_capture(handle), "end");
    expect_ok(rank, rank.controls.begin_capture(handle), "begin");
    expect(rank.cuda.cuEventQuery(event.get()) == kCudaErrorStreamCaptureUnsupported,
           "a query is allowed while a graph is captured");
    expect_ok(rank, rank.cuda.cuStreamIsCapturing(stream.get(), &status), "cuStreamIsCapturing");
    expect(status == CUstreamCaptureStatus::kInvalidated, "the capture is not spoilt");
    expect(rank.controls.end_capture(handle) == kCudaErrorStreamCaptureInvalidated, "end");
  }
  rank.room.barrier();
}

void registered_memory(Rank& rank) {
  const NcclApi& nccl = rank.nccl;
  expect((nccl.ncclMemAlloc != nullptr) == (nccl.ncclCommRegister != nullptr),
         "ncclMemAlloc and ncclCommRegister came in one version");
  if (nccl.ncclMemAlloc == nullptr) return;
  constexpr std::size_t kBytes = 4 << 20;
  constexpr std::size_t kCount = kBytes / 8;
  Comm comm(rank);
  void* memory = nullptr;
  void* handle = nullptr;
  nccl.check(nccl.ncclMemAlloc(&memory, kBytes), "ncclMemAlloc");
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  nccl.check(nccl.ncclCommRegister(comm.get(), memory, kBytes, &handle), "ncclCommRegister");
  expect_ok(rank, rank.cuda.cuMemsetD8Async(address, 1, kBytes, rank.stream), "cuMemsetD8Async");
  comm.done(nccl.ncclAllReduce(memory, memory, kCount, NcclDataType::kUint64, NcclOp::kSum,
                               comm.get(), rank.stream),
            "ncclAllReduce");
  std::vector<std::uint64_t> result(kCount);
  expect_ok(rank, rank.cuda.cuMemcpyDtoHAsync(result.data(), address, kBytes, rank.stream),
            "cuMemcpyDtoHAsync");
  expect_ok(rank, rank.cuda.cuStreamSynchronize(rank.stream), "cuStreamSynchronize");
  const std::uint64_t wanted = 0x0101010101010101U * static_cast<std::uint64_t>(rank.size);
  expect(result == std::vector<std::uint64_t>(kCount, wanted), "wrong result");
  nccl.check(nccl.ncclCommDeregister(comm.get(), handle), "ncclCommDeregister");
  nccl.check(nccl.ncclMemFree(memory), "ncclMemFree");
  comm.destroy();
}

void pointers_are_known(Rank& rank) {
  const Memory memory(rank, 100);
  int ordinal = -1;
  int count = -1;
  unsigned type = 0;
  CUdevice device = -1;
  CUuuid uuid{};
  CUuuid other{};
  const auto& cuda = rank.cuda;
  expect_ok(
      rank,
      cuda.cuPointerGetAttribute(&type, CUpointerAttribute::kMemoryType, memory.address() + 50),
      "cuPointerGetAttribute");
  expect(type == kCudaMemoryTypeDevice, "memory of the device is of another type");
  expect_ok(
      rank,
      cuda.cuPointerGetAttribute(&ordinal, CUpointerAttribute::kDeviceOrdinal, memory.address()),
      "cuPointerGetAttribute");
  expect_ok(rank, cuda.cuDeviceGetCount(&count), "cuDeviceGetCount");
  expect(ordinal >= 0 && ordinal < count, "no such ordinal");
  expect_ok(rank, cuda.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  expect_ok(rank, cuda.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
  expect(std::memcmp(&uuid, &other, sizeof(uuid)) != 0, "a UUID of zeros");
  int on_the_host = 0;
  const CUresult result = cuda.cuPointerGetAttribute(&type, CUpointerAttribute::kMemoryType,
                                                     reinterpret_cast<CUdeviceptr>(&on_the_host));
  expect(result == kCudaErrorInvalidValue, "memory of the host is known as the device's");
}

}  // namespace

std::vector<Test> device_tests() {
  return {{"events_are_places_in_a_stream", events_are_places_in_a_stream},
          {"a_wait_is_for_what_was_recorded_before_it", a_wait_is_for_what_was_recorded_before_it},
          {"the_default_stream_waits_for_streams_that_are_not_free_of_it",
           the_default_stream_waits_for_streams_that_are_not_free_of_it},
          {"collectives_are_ordered_by_events", collectives_are_ordered_by_events},
          {.name = "a_missing_wait_gives_wrong_data",
           .body = a_missing_wait_gives_wrong_data,
           .needs_stand_in = true,
           .is_for_one_rank = true,
           .races = true},
          {"calls_without_a_context_are_refused", calls_without_a_context_are_refused},
          {.name = "a_query_spoils_a_capture_unless_it_is_relaxed",
           .body = a_query_spoils_a_capture_unless_it_is_relaxed,
           .needs_stand_in = true},
          {"registered_memory", registered_memory},
          {"pointers_are_known", pointers_are_known}};
}

}  // namespace sparkhvd::conformity
