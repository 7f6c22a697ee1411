// The device's side of the engine: makes communicators, launches operations in the order in which
// the driver hands them over, and finds out when they have ended.
//
// **Threads.** One thread, "sparkhvd-nccl", makes every call of NCCL, because neither a communicator
// nor two of one device may be used by two threads at a time. The driver hands over requests and
// takes news; a ring of its wakeup says that there are some. A second thread runs only to abort:
// ncclCommAbort may block, and no caller waits for it longer than kAbortTime.
//
// **Ownership.** Requests and news are queues with locks of their own. Communicators and operations
// in flight belong to the plane's thread; when it has parked, to the one that aborts.
//
// **Shutdown.** Failure and shutdown alike: `abort`, then `stop`. A thread that a library does not give
// back is left behind, with everything that it may touch: it can be neither joined nor ended, and
// waiting for it would hang the process.
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
  /// False once closed: then it will never be read.
  bool push(Request request);
  /// The next one; nothing after `longest`, or when woken.
  std::optional<Request> next(Clock::duration longest);
  void wake();
  /// Takes nothing more; returns what is left.
  std::deque<Request> close();

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_ GUARDED_BY(mutex_);
  std::atomic<bool> has_some_{false};  // or is woken
  bool is_woken_ GUARDED_BY(mutex_) = false;
  bool is_closed_ GUARDED_BY(mutex_) = false;
};

/// News of the device since the driver last asked.
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
  std::vector<Broken> broken;    // communicators that have lost a peer, by what NCCL says
  std::optional<Error> failure;  // of NCCL or CUDA: nothing can be launched any more
  bool is_aborted = false;       // every communicator has ended, or had its time
  bool is_busy = false;          // then: the device still runs what was on them
};

class DevicePlane {
 public:
  /// `ring` wakes the driver; called by any thread until `stop`. `awaits_next`: its thread has a CPU on
  /// which it may look for what comes next, for a moment.
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
  /// Operations of the set from this number on end without result: a rank has left that they need.
  void mark_for_abort(std::int32_t process_set, std::uint64_t limit);
  /// Something may be in `take_news`.
  bool has_news() const noexcept;
  News take_news();
  /// Activity of the plane's thread: "the GPU", or the function of NCCL that it is in.
  const char* whereabouts() const noexcept;
  /// Ends every communicator and what runs on them; news follow. Again: nothing happens.
  void abort();
  /// After `abort`: waits for its end until `deadline`. False if a thread had to be left behind.
  bool stop(TimePoint deadline);

 private:
  class Core;

  std::shared_ptr<Core> core_;
  std::thread thread_;
  std::thread aborter_;
};

}  // namespace sparkhvd::nccl
