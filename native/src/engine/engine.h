// The engine of one rank: accepts submissions, negotiates them with the other ranks, and drives the
// collectives. Its parts:
//
//     Driver        the driving thread, and how threads wait
//     Core          all parts that the driver drives:
//       InFlight      operations of callers, and the engine's failure
//       Peers         connections, and ranks that leave or are lost
//       ProcessSets   the life of collective operations
//       DeviceOrders  collective operations on a device
//       PointToPoint  messages
//
// **Threads.** Any number of callers and one progress thread, see the driver.
//
// **Shutdown.** The last driver sends a goodbye on every connection, lets the peers read it, and closes;
// then the progress thread is joined.
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

/// Error of every call on an engine in a process forked after its creation.
Error created_before_fork();

class Engine {
 public:
  /// Collective; throws TIMEOUT, PEER_LOST or MISMATCH naming the rank.
  explicit Engine(EngineOptions options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  Rank rank() const noexcept { return core_.world().rank(); }
  std::size_t size() const noexcept { return core_.world().size(); }
  const WorldOptions& world_options() const noexcept { return core_.world().options(); }
  /// The ranks of a process set, ascending. Throws InvalidArgument if it does not exist or this rank
  /// is not in it.
  std::shared_ptr<const std::vector<Rank>> members(std::int32_t process_set) const {
    return core_.in_flight().members(process_set);
  }
  double stall_shutdown_s() const noexcept { return stall_shutdown_s_; }

  /// Throws UNSUPPORTED if a library or the device is missing; has no effect if it is open.
  void open_device(const nccl::DeviceOptions& options);
  /// Null before it is open.
  std::shared_ptr<nccl::Device> device() const { return core_.devices().device(); }

  /// Throws InvalidArgument for a name in flight, else the error that made the engine unusable.
  void submit(std::shared_ptr<Operation> operation);
  /// Drives until the operation is finished, `deadline`, or a signal.
  void wait(const Operation& operation, TimePoint deadline);
  /// The same until it is launched on the device, or has ended.
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
