// The device plane: the part of the engine that uses NCCL. It creates communicators, launches operations in the
// driver's order, and detects their ends.
//
// **Threads.** One thread, "sparkhvd-nccl", makes all NCCL calls, because two threads must not use a communicator, or
// two communicators of a device, at the same time. The driver sends it requests and receives its events; the plane
// wakes the driver by the wakeup event. A second thread runs only to abort: ncclCommAbort may block, and no caller
// waits for it longer than kAbortTime.
//
// **Ownership.** The queues of requests and events have their own locks. Communicators and operations in flight belong
// to the plane's thread. When it has left NCCL for good (it has *parked*), they belong to the aborting thread.
//
// **Shutdown.** After a failure and at shutdown the driver calls `abort` and then `stop`. A thread that never returns
// from a library is abandoned, with everything that it may use: it cannot be joined or ended, and waiting for it would
// hang the process.
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

/// Longest time after a failure until operations end, even if their communicators have not ended.
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
  /// Adds a request. False after `close`: the plane's thread would never read it.
  bool push(Request request);
  /// Waits for the next request. std::nullopt after `longest`, or after `wake`.
  std::optional<Request> next(Clock::duration longest);
  void wake();
  /// Accepts no more requests; returns the remaining ones.
  std::deque<Request> close();

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_ GUARDED_BY(mutex_);
  std::atomic<bool> has_some_{false};  // there are requests, or `wake` was called
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
  std::vector<Done> done;  // ended operations, in the order of their end
  std::vector<Id> ids;
  std::vector<Broken> broken;    // communicators for which NCCL has reported the loss of a peer
  std::optional<Error> failure;  // error of NCCL or CUDA, after which nothing can be launched
  bool is_aborted = false;       // every communicator has ended, or the time for it is over
  bool is_busy = false;          // if aborted: the device may still run their operations
};

class DevicePlane {
 public:
  /// `ring` wakes the driver; any thread may call it until `stop`. `awaits_next`: the plane's thread has a CPU, so it
  /// may poll for the next request for a moment.
  DevicePlane(std::shared_ptr<Device> device, std::function<void()> ring, bool awaits_next);
  DevicePlane(const DevicePlane&) = delete;
  DevicePlane& operator=(const DevicePlane&) = delete;
  ~DevicePlane();

  const std::shared_ptr<Device>& device() const noexcept;

  // Only the driver's thread calls these.
  void launch(Launch launch);
  void make_unique_id(std::int32_t process_set);
  /// Removes a process set. All of its operations must have ended on this rank.
  void remove(std::int32_t process_set);
  /// Ends operations of the set from number `limit` on without a result, because a rank has left.
  void mark_for_abort(std::int32_t process_set, std::uint64_t limit);
  /// True if `take_news` may return events.
  bool has_news() const noexcept;
  News take_news();
  /// What the plane's thread waits for: "the GPU", or the name of its current NCCL function.
  const char* whereabouts() const noexcept;
  /// Ends every communicator and its operations, and then reports it as an event. Idempotent.
  void abort();
  /// Waits until `deadline` for the end of the plane's threads, after `abort`. False if it abandoned a thread.
  bool stop(TimePoint deadline);

 private:
  class Core;

  std::shared_ptr<Core> core_;
  std::thread thread_;
  std::thread aborter_;
};

}  // namespace sparkhvd::nccl
