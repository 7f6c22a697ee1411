// The engine of one rank: accepts submissions, negotiates them with the other ranks, and drives the
// collectives. Its parts:
//
//     Driver        chooses the driving thread, and lets threads wait
//     Core          all parts that the driver drives:
//       InFlight      operations of callers, and the engine's failure
//       Peers         connections, and ranks that leave or are lost
//       ProcessSets   collective operations on the CPU
//       DeviceOrders  collective operations on a device
//       PointToPoint  messages between two ranks (send, recv)
//
// **Threads.** Any number of callers and one progress thread: see driver.h.
//
// **Shutdown.** The last driver sends a goodbye on every connection, lets the peers read it, and closes the
// connections. Then the progress thread is joined.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/core.h"
#include "engine/driver.h"
#include "error.h"
#include "nccl/plane.h"
#include "operation.h"
#include "sync.h"

namespace sparkhvd {

/// Error of every call on an engine in a process that was forked after the engine's creation.
Error created_before_fork();

class Engine {
 public:
  /// Starts the engine; all ranks must call it. Throws TIMEOUT, PEER_LOST or MISMATCH with the rank.
  explicit Engine(EngineOptions options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  Rank rank() const noexcept { return core_.world().rank(); }
  std::size_t size() const noexcept { return core_.world().size(); }
  const WorldOptions& world_options() const noexcept { return core_.world().options(); }
  /// The ranks of a process set, ascending. Throws InvalidArgument if the set does not exist or does not have this
  /// rank.
  std::shared_ptr<const std::vector<Rank>> members(std::int32_t process_set) const {
    return core_.in_flight().members(process_set);
  }
  double stall_shutdown_s() const noexcept { return stall_shutdown_s_; }

  /// Opens the device; has no effect if it is open. Throws UNSUPPORTED if a library or the device is missing.
  void open_device(const nccl::DeviceOptions& options);
  /// The device; null before it is open.
  std::shared_ptr<nccl::Device> device() const { return core_.devices().device(); }

  /// Submits an operation. Throws InvalidArgument for a name in flight, or the error that made the engine unusable.
  void submit(std::shared_ptr<Operation> operation);
  /// Drives until the operation is finished, `deadline`, or a signal.
  void wait(const Operation& operation, TimePoint deadline);
  /// Drives until the operation is launched on the device or has ended, `deadline`, or a signal.
  void wait_launched(const Operation& operation, TimePoint deadline);
  /// Submits and waits, without a change of drivers in between.
  void run(const std::shared_ptr<Operation>& operation, TimePoint deadline);
  std::vector<Loss> losses() const { return core_.in_flight().losses(); }
  Recorder& recorder() noexcept { return core_.recorder(); }
  void shutdown() EXCLUDES(shutdown_mutex_);
  void abort(const std::string& reason);
  /// Throws the error that made the engine unusable.
  void check() const;
  void after_fork() noexcept;
  bool is_forked_copy() const noexcept { return is_forked_copy_.load(std::memory_order_relaxed); }

 private:
  Engine(EngineOptions options, Driver::Descriptors descriptors);

  const double stall_shutdown_s_;
  Core core_;
  Driver driver_;
  std::atomic<bool> is_forked_copy_{false};
  Mutex shutdown_mutex_;
  bool is_shut_down_ GUARDED_BY(shutdown_mutex_) = false;
  std::jthread thread_;
};

}  // namespace sparkhvd
