// The device's side of the engine: creates communicators, launches operations in the driver's order, and
// detects their ends.
//
// **Threads.** One thread, "sparkhvd-nccl", makes every call of NCCL, because neither a communicator
// nor two of one device may be used by two threads at a time. The driver sends requests and receives
// events; the plane wakes it by its wakeup event. A second thread runs only to abort: ncclCommAbort may
// block, and no caller waits for it longer than kAbortTime.
//
// **Ownership.** Requests and events are queues with their own locks. Communicators and operations in
// flight belong to the plane's thread, and after it has parked to the aborting thread.
//
// **Shutdown.** Failure and shutdown alike: `abort`, then `stop`. A thread that never returns from a library
// is abandoned, with everything that it may use: it can be neither joined nor ended, and waiting for it
// would hang the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "clock.h"
#include "error.h"
#include "nccl/device_operation.h"
#include "sync.h"

namespace sparkhvd::nccl {

/// Longest wait of operations for the end of their communicators after a failure.
inline constexpr auto kAbortTime = std::chrono::seconds(3);

struct MakeUniqueId {
  std::int32_t process_set = 0;
};
struct RemoveCommunicator {
  std::int32_t process_set = 0;
};
struct FreeMemory {
  std::shared_ptr<DeviceMemory> memory;
};
using Request = std::variant<std::unique_ptr<Launch>, MakeUniqueId, RemoveCommunicator, FreeMemory>;

/// Requests to the plane's thread, in order.
class Requests {
 public:
  /// False after `close`: it will never be read.
  bool push(Request request);
  /// The next request; nothing after `longest`, or when woken.
  std::optional<Request> next(Clock::duration longest);
  void wake();
  /// Accepts no more requests; returns the remaining ones.
  std::deque<Request> close();

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_ GUARDED_BY(mutex_);
  std::atomic<bool> has_some_{false};  // or is woken
  bool is_woken_ GUARDED_BY(mutex_) = false;
  bool is_closed_ GUARDED_BY(mutex_) = false;
};

/// Events of the device since the driver's last call.
struct News {
  struct Done {
    std::int32_t process_set = 0;
    std::uint64_t sequence = 0;
    std::int32_t status = SPARKHVD_OK;
    std::string message = {};
  };
  struct Id {
    std::int32_t process_set = 0;
    NcclUniqueId id{};
  };
  struct Broken {
    std::int32_t process_set = 0;
    Error error;
  };
  std::vector<Done> done;  // in the order of their end
  std::vector<Id> ids;
  std::vector<Broken> broken;    // communicators that have lost a peer, according to NCCL
  std::optional<Error> failure;  // of NCCL or CUDA: launches are no longer possible
  bool is_aborted = false;       // every communicator has ended, or timed out
  bool is_busy = false;          // then: the device still runs their operations
};

class DevicePlane {
 public:
  /// `ring` wakes the driver; called by any thread until `stop`. `awaits_next`: its thread has a CPU to
  /// poll for the next request for a moment.
  DevicePlane(std::shared_ptr<Device> device, std::function<void()> ring, bool awaits_next);
  DevicePlane(const DevicePlane&) = delete;
  DevicePlane& operator=(const DevicePlane&) = delete;
  ~DevicePlane();

  const std::shared_ptr<Device>& device() const noexcept;

  // The driver's.
  void launch(Launch launch);
  void make_unique_id(std::int32_t process_set);
  /// All of its operations have ended on this rank.
  void remove(std::int32_t process_set);
  /// Operations of the set from this number on end without result, because a needed rank has left.
  void mark_for_abort(std::int32_t process_set, std::uint64_t limit);
  /// True if `take_news` may return events.
  bool has_news() const noexcept;
  News take_news();
  /// Activity of the plane's thread: "the GPU", or its current NCCL function.
  const char* whereabouts() const noexcept;
  /// Ends every communicator and its operations; events follow. Idempotent.
  void abort();
  /// After `abort`: waits for its end until `deadline`. False if a thread was abandoned.
  bool stop(TimePoint deadline);

 private:
  class Core;

  std::shared_ptr<Core> core_;
  std::thread thread_;
  std::thread aborter_;
};

}  // namespace sparkhvd::nccl
