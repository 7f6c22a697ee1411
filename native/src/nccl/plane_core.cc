#include "nccl/plane_core.h"

#include <pthread.h>

#include <algorithm>

#include "collectives/spec.h"

namespace sparkhvd::nccl {
namespace {

// For this time after an event the thread polls without sleeping, so that it notices the next event at once.
constexpr auto kSpinTime = std::chrono::microseconds(100);

/// Thrown when a rank that an operation needs has left.
struct Condemned {};

std::int32_t status_of(NcclResult result) noexcept {
  switch (result) {
    case NcclResult::kSystemError:
    case NcclResult::kRemoteError:
      return SPARKHVD_PEER_LOST;
    case NcclResult::kInvalidUsage:
      return SPARKHVD_INVALID_ARGUMENT;  // for example two ranks on one GPU
    default:
      return static_cast<int>(result) == 8 ? SPARKHVD_TIMEOUT : SPARKHVD_INTERNAL;  // 8: since 2.30
  }
}

}  // namespace

void DevicePlane::Core::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "sparkhvd-nccl");
  try {
    // Sets the relaxed mode for this thread: its calls do not disturb another thread's capture of a graph, and a
    // capture does not disturb its calls.
    CUstreamCaptureMode mode = CUstreamCaptureMode::kRelaxed;
    cuda().check(cuda().cuThreadExchangeStreamCaptureMode(&mode),
                 "cuThreadExchangeStreamCaptureMode");
    cuda().check(cuda().cuCtxSetCurrent(device->context()), "cuCtxSetCurrent");
    work();
  } catch (const Interrupted&) {  // the driver has requested the abort
  } catch (const Error& error) {
    tell([&](News& news) { news.failure = error; });
  } catch (const std::exception& error) {
    tell([&](News& news) { news.failure.emplace(SPARKHVD_INTERNAL, error.what()); });
  }
  park();
}

void DevicePlane::Core::work() {
  while (!is_aborting.load()) {
    if (in_flight_.size() >= kMaxInFlight) {
      pause(sleep_time());
    } else if (auto request = requests->next(sleep_time())) {
      std::visit([this](auto& one) { serve(one); }, *request);
      spin_until_ = Clock::now() + kSpinTime;
    }
    if (poll_finished()) spin_until_ = Clock::now() + kSpinTime;
    poll_errors();
    if (has_marked_.load(std::memory_order_acquire)) poll_marked();
    poll_retired();
  }
}

/// Records that this thread does not use NCCL any more.
void DevicePlane::Core::park() {
  std::vector<ncclComm_t> late;
  {
    const Lock lock(mutex_);
    if (is_live_taken_) late = std::exchange(live_, {});
  }
  for (const ncclComm_t communicator : late) nccl().ncclCommAbort(communicator);
  const Lock lock(mutex_);
  is_parked_ = true;
  changed_.notify_all();
}

Clock::duration DevicePlane::Core::sleep_time() {
  const bool waits = !in_flight_.empty() || !retired_.empty();
  // With `awaits_next_` it also polls for the next launch: waking this thread takes longer than all of its work.
  if ((waits || awaits_next_) && Clock::now() < spin_until_) {
    sleep_ = kShortestSleep;
    std::this_thread::yield();
    return Clock::duration::zero();
  }
  if (!waits) {
    sleep_ = kShortestSleep;
    return Clock::duration::max();
  }
  return std::exchange(sleep_, std::min<Clock::duration>(2 * sleep_, kLongestSleep));
}

// ---- Requests -----------------------------------------------------------------------

void DevicePlane::Core::serve(MakeUniqueId& request) {
  const Doing doing(*this, "ncclGetUniqueId");
  News::Id made{request.process_set, {}};
  if (const auto result = nccl().ncclGetUniqueId(&made.id); result != NcclResult::kSuccess) {
    fail(result, "ncclGetUniqueId", nullptr);
  }
  tell([&](News& news) { news.ids.push_back(made); });
}

void DevicePlane::Core::serve(RemoveCommunicator& request) {
  const auto entry = communicators_.find(request.process_set);
  if (entry == communicators_.end()) return;
  Communicator communicator = std::move(entry->second);
  communicators_.erase(entry);
  if (communicator.is_broken) return;  // the end of the plane aborts it
  for (const auto& [memory, handle] : communicator.registered) {
    nccl().ncclCommDeregister(communicator.handle, handle);
  }
  const Doing doing(*this, "ncclCommFinalize");
  const auto result = nccl().ncclCommFinalize(communicator.handle);
  // If it cannot be finalized, the end of the plane aborts it.
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) {
    retired_.push_back(communicator.handle);
  }
}

void DevicePlane::Core::serve(FreeMemory& request) {
  for (auto& [id, communicator] : communicators_) {
    const auto entry = communicator.registered.find(request.memory.get());
    if (entry == communicator.registered.end()) continue;
    nccl().ncclCommDeregister(communicator.handle, entry->second);
    communicator.registered.erase(entry);
  }
}

void DevicePlane::Core::serve(std::unique_ptr<Launch>& request) {
  const Launch& launch = *request;
  InFlight entry{launch.process_set, launch.sequence, launch.operation, {}, nullptr};
  const auto broken = communicators_.find(launch.process_set);
  bool is_marked_now = is_marked_for_abort(launch.process_set, launch.sequence);
  if (!is_marked_now && broken != communicators_.end() && broken->second.is_broken) {
    stuck_.push_back(std::move(entry));
    return;
  }
  if (!is_marked_now) {
    try {
      if (launch.unique_id) make_communicator(launch);
      run_on_device(launch);
    } catch (const Condemned&) {
      is_marked_now = true;
      poll_marked();
      // Waits until the communicator has ended. Operations that the departing rank has finished may still finish on it.
      while (has_marked_communicator(launch.process_set) && !is_aborting.load()) {
        pause(kLongestSleep);
        poll_finished();
        poll_marked();
      }
    } catch (const Error& error) {
      if (error.status() == SPARKHVD_PEER_LOST) {
        break_communicator(launch.process_set, error);
        stuck_.push_back(std::move(entry));
        return;
      }
      // If memory is short, only this registration fails; other errors fail the engine.
      if (launch.descriptor().collective != Collective::kRegister ||
          error.status() != SPARKHVD_UNSUPPORTED) {
        throw;
      }
      tell([&](News& news) {
        news.done.push_back({launch.process_set, launch.sequence, error.status(), error.what()});
      });
      return;
    }
  }
  if (is_marked_now) return end_without_result(entry);
  if (launch.operation) {
    auto& on_device = *launch.operation->on_device;
    on_device.done = Event(device);
    entry.done = on_device.done.get();
  } else {
    entry.own_event = Event(device);
    entry.done = entry.own_event.get();
  }
  cuda().check(cuda().cuEventRecord(entry.done, device->stream()), "cuEventRecord");
  if (in_flight_.empty()) next_error_look_ = Clock::now() + kAsyncErrorPeriod;
  in_flight_.push_back(std::move(entry));
  if (!launch.operation) return;
  launch.operation->on_device->is_launched.store(true, std::memory_order_release);
  tell([](News&) {});  // wakes the driver, because a thread may wait for the launch
}

// ---- Communicators ---------------------------------------------------------------------------

void DevicePlane::Core::add_live(ncclComm_t communicator) {
  const Lock lock(mutex_);
  live_.push_back(communicator);
}

bool DevicePlane::Core::remove_live(ncclComm_t communicator) {
  const Lock lock(mutex_);
  return std::erase(live_, communicator) > 0;
}

void DevicePlane::Core::fail(NcclResult result, const char* call, ncclComm_t communicator) const {
  throw Error(status_of(result), nccl().describe(result, call, communicator));
}

/// Creates a communicator. All ranks of the process set do this at the same position in the order of operations.
void DevicePlane::Core::make_communicator(const Launch& launch) {
  const Doing doing(*this, "ncclCommInitRankConfig");
  NcclConfig config = non_blocking_config();
  ncclComm_t handle = nullptr;
  const auto result =
      nccl().ncclCommInitRankConfig(&handle, static_cast<int>(launch.ranks.size()),
                                    *launch.unique_id, static_cast<int>(launch.index), &config);
  if (handle != nullptr) {
    add_live(handle);
    communicators_[launch.process_set].handle = handle;
  }
  settle(handle, result, "ncclCommInitRankConfig", &launch);
}

DevicePlane::Core::Communicator& DevicePlane::Core::communicator_of(const Launch& launch) {
  const auto entry = communicators_.find(launch.process_set);
  if (entry != communicators_.end()) return entry->second;
  throw Error(SPARKHVD_INTERNAL, "process set " + std::to_string(launch.process_set) +
                                     " has no communicator, because no order had its id.");
}

/// Waits until the communicator has finished a call. A non-blocking communicator requires this before the next call.
void DevicePlane::Core::settle(ncclComm_t communicator, NcclResult result, const char* call,
                               const Launch* launch) {
  if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
    fail(result, call, communicator);
  }
  const TimePoint spin_end = Clock::now() + kSpinTime;
  Clock::duration sleep = kShortestSleep;
  while (true) {
    check_abort();
    NcclResult state = NcclResult::kSuccess;
    const auto asked = nccl().ncclCommGetAsyncError(communicator, &state);
    if (asked != NcclResult::kSuccess) fail(asked, "ncclCommGetAsyncError", communicator);
    if (state == NcclResult::kSuccess) return;
    if (state != NcclResult::kInProgress) fail(state, call, communicator);
    if (launch != nullptr && is_marked_for_abort(launch->process_set, launch->sequence)) {
      throw Condemned{};
    }
    poll_finished();
    if (Clock::now() < spin_end) {
      std::this_thread::yield();
    } else {
      pause(sleep);
      sleep = std::min<Clock::duration>(2 * sleep, kLongestSleep);
    }
  }
}

/// Sleeps between two polls, because NCCL has no function to wait. An abort ends the sleep.
void DevicePlane::Core::pause(Clock::duration longest) {
  const TimePoint deadline = Clock::now() + longest;
  Lock lock(mutex_);
  while (!is_aborting.load() && lock.wait(changed_, deadline)) {
  }
}

// ---- Operations ------------------------------------------------------------------------------

void DevicePlane::Core::run_on_device(const Launch& launch) {
  if (launch.descriptor().collective == Collective::kRegister) return make_memory(launch);
  if (!has_work(launch)) return;
  const Communicator& communicator = communicator_of(launch);
  std::span<const OnDevice::Tensor> tensors;
  Scratch scratch;
  if (launch.operation) {
    const OnDevice& on_device = *launch.operation->on_device;
    tensors = on_device.tensors;
    const Doing doing(*this, "cuStreamWaitEvent");
    cuda().check(cuda().cuStreamWaitEvent(device->stream(), on_device.ready.get(), 0),
                 "cuStreamWaitEvent");
  } else {
    scratch = scratch_of(scratch_bytes(launch.descriptor()));
  }
  const char* call = spec_of(launch.descriptor().collective).device_algorithm;
  const Doing doing(*this, call);
  check_abort();
  nccl().check(nccl().ncclGroupStart(), "ncclGroupStart");
  try {
    enqueue({nccl(), communicator.handle, device->stream(), launch, tensors, scratch});
  } catch (...) {
    nccl().ncclGroupEnd();
    throw;
  }
  settle(communicator.handle, nccl().ncclGroupEnd(), "ncclGroupEnd", &launch);
}

void DevicePlane::Core::make_memory(const Launch& launch) {
  const Doing doing(*this, "ncclMemAlloc");
  Communicator& communicator = communicator_of(launch);
  const auto bytes = static_cast<std::size_t>(launch.descriptor().numbers.at(0));
  auto memory = std::make_shared<DeviceMemory>(device, bytes);
  if (memory->can_be_registered() && nccl().ncclCommRegister != nullptr &&
      nccl().ncclCommDeregister != nullptr) {
    check_abort();
    void* handle = nullptr;
    const auto result =
        nccl().ncclCommRegister(communicator.handle, memory->data(), bytes, &handle);
    settle(communicator.handle, result, "ncclCommRegister", &launch);
    if (handle != nullptr) communicator.registered.emplace(memory.get(), handle);
  }
  // This must be the last step: if an earlier step fails, the memory is freed, and ncclMemFree does not wait for the
  // stream.
  const auto address = reinterpret_cast<CUdeviceptr>(memory->data());
  cuda().check(cuda().cuMemsetD8Async(address, 0, bytes, device->stream()), "cuMemsetD8Async");
  launch.operation->on_device->buffer = std::make_shared<DeviceBuffer>(memory, requests);
}

const Scratch& DevicePlane::Core::scratch_of(std::size_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_;
  // The previous memory stays while operations are in flight, because freeing it would wait for the device. The size
  // doubles each time, so that there are few pieces.
  scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
  auto zeros = std::make_unique<DeviceMemory>(device, scratch_bytes_);
  auto results = std::make_unique<DeviceMemory>(device, scratch_bytes_);
  cuda().check(cuda().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(zeros->data()), 0,
                                      scratch_bytes_, device->stream()),
               "cuMemsetD8Async");
  scratch_ = {zeros->data(), results->data()};
  scratch_memory_.push_back(std::move(zeros));
  scratch_memory_.push_back(std::move(results));
  return scratch_;
}

}  // namespace sparkhvd::nccl
