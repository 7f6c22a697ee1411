// Work of the plane's thread between launches: finished operations, ranks that leave, and the plane's end.
#include <pthread.h>

#include <algorithm>

#include "nccl/plane_core.h"

namespace sparkhvd::nccl {
namespace {

// After a rank has left, operations that it has finished have this time to finish here, before their communicator ends.
constexpr auto kDepartureTime = std::chrono::seconds(1);
// The aborting thread waits for this time until the plane's thread returns from NCCL. Then it aborts the communicators
// during the call.
constexpr auto kParkTime = std::chrono::milliseconds(500);

}  // namespace

// ---- Between launches ------------------------------------------------------------------

bool DevicePlane::Core::poll_finished() {
  bool moved = false;
  while (!in_flight_.empty()) {
    const InFlight& first = in_flight_.front();
    const CUresult result = cuda().cuEventQuery(first.done);
    if (result == kCudaErrorNotReady) break;
    cuda().check(result, "cuEventQuery");
    // The event of an operation may be reached because its communicator has failed. Such an operation is not done.
    const auto used = communicators_.find(first.process_set);
    if (used != communicators_.end() && !is_sound(used->first, used->second)) break;
    if (first.is_lost) {
      end_without_result(first);
    } else {
      tell([&](News& news) { news.done.push_back({first.process_set, first.sequence}); });
    }
    in_flight_.pop_front();
    moved = true;
  }
  if (in_flight_.empty() && scratch_memory_.size() > 2) {
    scratch_memory_.erase(scratch_memory_.begin(), scratch_memory_.end() - 2);
  }
  return moved;
}

void DevicePlane::Core::poll_errors() {
  if (in_flight_.empty()) return;
  const auto now = Clock::now();
  if (now < next_error_look_) return;
  next_error_look_ = now + kAsyncErrorPeriod;
  for (auto& [id, communicator] : communicators_) is_sound(id, communicator);
}

/// False if the communicator has lost a peer; the driver is then notified. Other errors are thrown and fail the engine.
bool DevicePlane::Core::is_sound(std::int32_t process_set, Communicator& communicator) {
  if (communicator.is_broken) return false;
  check_abort();
  const ncclComm_t handle = communicator.handle;
  try {
    NcclResult state = NcclResult::kSuccess;
    const auto asked = nccl().ncclCommGetAsyncError(handle, &state);
    if (asked != NcclResult::kSuccess) fail(asked, "ncclCommGetAsyncError", handle);
    if (state == NcclResult::kSuccess || state == NcclResult::kInProgress) return true;
    fail(state, "a collective", handle);
  } catch (const Error& error) {
    if (error.status() != SPARKHVD_PEER_LOST) throw;
    break_communicator(process_set, error);
    return false;
  }
}

/// Notifies the driver of a broken communicator. The driver's connections show whether the peer has died or has left.
void DevicePlane::Core::break_communicator(std::int32_t process_set, const Error& error) {
  communicators_[process_set].is_broken = true;
  tell([&](News& news) { news.broken.push_back({process_set, error}); });
}

void DevicePlane::Core::end_without_result(const InFlight& operation) {
  tell([&](News& news) {
    news.done.push_back({operation.process_set, operation.sequence, SPARKHVD_SHUT_DOWN});
  });
}

void DevicePlane::Core::poll_retired() {
  std::erase_if(retired_, [this](ncclComm_t communicator) {
    check_abort();
    NcclResult state = NcclResult::kSuccess;
    const auto asked = nccl().ncclCommGetAsyncError(communicator, &state);
    if (asked == NcclResult::kSuccess && state == NcclResult::kInProgress) return false;
    if (asked == NcclResult::kSuccess && state == NcclResult::kSuccess) {
      if (remove_live(communicator)) nccl().ncclCommDestroy(communicator);
    }
    return true;  // after an error the end of the plane aborts it
  });
}

// ---- Ranks that leave ------------------------------------------------------------------------

void DevicePlane::Core::mark_for_abort(std::int32_t process_set, std::uint64_t limit) {
  {
    const Lock lock(mutex_);
    const AbortMark given{limit, Clock::now() + kDepartureTime};
    auto [entry, is_new] = marked_.try_emplace(process_set, given);
    if (!is_new) entry->second.limit = std::min(entry->second.limit, limit);
  }
  has_marked_.store(true, std::memory_order_release);
  requests->wake();
}

bool DevicePlane::Core::is_marked_for_abort(std::int32_t process_set, std::uint64_t sequence) {
  if (!has_marked_.load(std::memory_order_acquire)) return false;
  const Lock lock(mutex_);
  const auto entry = marked_.find(process_set);
  return entry != marked_.end() && sequence >= entry->second.limit;
}

/// Ends communicators that a rank has left, when the operations that it has finished are finished here or
/// kDepartureTime is over.
void DevicePlane::Core::poll_marked() {
  std::map<std::int32_t, AbortMark> marked;
  {
    const Lock lock(mutex_);
    marked = marked_;
  }
  for (const auto& [process_set, mark] : marked) {
    const auto entry = communicators_.find(process_set);
    if (entry == communicators_.end()) continue;
    if (entry->second.is_broken || !has_earlier(process_set, mark.limit) ||
        Clock::now() >= mark.deadline) {
      end_marked(process_set);
    }
  }
}

bool DevicePlane::Core::has_earlier(std::int32_t process_set, std::uint64_t limit) const {
  return std::ranges::any_of(in_flight_, [&](const InFlight& one) {
    return one.process_set == process_set && one.sequence < limit;
  });
}

/// Aborts a communicator that a rank has left. Its remaining operations end without a result, even if the departing
/// rank has finished them, because data is missing here.
void DevicePlane::Core::end_marked(std::int32_t process_set) {
  const auto entry = communicators_.find(process_set);
  if (entry == communicators_.end()) return;
  const Doing doing(*this, "ncclCommAbort");
  const ncclComm_t handle = entry->second.handle;
  communicators_.erase(entry);
  {
    const Lock lock(mutex_);
    marked_[process_set].limit = 0;
  }
  for (InFlight& one : in_flight_) one.is_lost |= one.process_set == process_set;
  if (handle != nullptr && remove_live(handle)) nccl().ncclCommAbort(handle);
  std::erase_if(stuck_, [&](const InFlight& one) {
    if (one.process_set != process_set) return false;
    end_without_result(one);
    return true;
  });
}

// ---- The end ---------------------------------------------------------------------------------

void DevicePlane::Core::ask_to_abort() {
  {
    const Lock lock(mutex_);
    is_aborting.store(true);
    is_aborter_running_ = true;
    changed_.notify_all();
  }
  requests->wake();
}

void DevicePlane::Core::abort_all() noexcept {
  ::pthread_setname_np(::pthread_self(), "sparkhvd-abort");
  const TimePoint deadline = Clock::now() + kAbortTime;
  bool is_busy = true;
  try {
    std::vector<ncclComm_t> live;
    {
      const TimePoint park_deadline = Clock::now() + kParkTime;
      Lock lock(mutex_);
      while (!is_parked_ && lock.wait(changed_, park_deadline)) {
      }
      live = std::exchange(live_, {});
      is_live_taken_ = true;
    }
    const CurrentContext current(cuda(), device->context());
    const RelaxedCapture relaxed(cuda());
    if (!live.empty()) {
      // Aborts all communicators in one group, because single aborts may wait for each other's kernels.
      nccl().ncclGroupStart();
      for (const ncclComm_t communicator : live) nccl().ncclCommAbort(communicator);
      nccl().ncclGroupEnd();
    }
    // Waits for the end of the kernels, because until then they may write.
    while ((is_busy = cuda().cuStreamQuery(device->stream()) == kCudaErrorNotReady) &&
           Clock::now() < deadline) {
      std::this_thread::sleep_for(kLongestSleep);
    }
  } catch (const std::exception&) {  // the driver's deadline ends the operations
  }
  // Drops the remaining requests. This frees memory that callers have released, after the communicators have ended.
  requests->close().clear();
  {
    const Lock lock(mutex_);
    is_busy |= !is_parked_;  // a call that returns later may still launch a kernel
  }
  tell([is_busy](News& news) {
    news.is_aborted = true;
    news.is_busy = is_busy;
  });
  const Lock lock(mutex_);
  is_aborter_running_ = false;
  changed_.notify_all();
}

bool DevicePlane::Core::wait_for_end(TimePoint deadline) {
  Lock lock(mutex_);
  while ((!is_parked_ || is_aborter_running_) && lock.wait(changed_, deadline)) {
  }
  return is_parked_ && !is_aborter_running_;
}

}  // namespace sparkhvd::nccl
