// Operations on devices: in one order for all process sets. The plane (nccl/plane.h) launches them, and they finish
// when the device has finished.
//
// Two NCCL communicators deadlock if two ranks launch their operations in different orders. So rank 0 determines one
// order: the coordinator of a process set decides the set's next operation and sends it to rank 0. Rank 0 passes it on
// to the ranks of the set. A rank launches operations in the order in which rank 0's frames arrive.
//
// **Threads.** Only the driver's thread calls it, except `open`, `device` and `is_open`.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "engine/group.h"
#include "engine/in_flight.h"
#include "engine/peers.h"
#include "nccl/plane.h"
#include "recorder.h"
#include "transport/wakeup_event.h"

namespace sparkhvd {

class DeviceOrders {
 public:
  struct Options {
    Rank rank{};
    double stall_warning_s = 0;
    bool has_cpu_for_plane = false;  // each rank of the host has a second CPU, for the plane
  };
  /// Effects of a process set's orders on its other operations.
  struct Hooks {
    /// Refuses a waiting operation that will not get an order.
    std::function<void(const Refuse&)> refuse;
    /// Ends waiting operations: an order has arrived, or no more orders can arrive.
    std::function<void(Group&)> settle;
    /// Notifies threads that wait for a launch.
    std::function<void()> launched;
  };
  DeviceOrders(const Options& options, Groups& groups, InFlight& in_flight, Peers& peers,
               WakeupEvent& wakeup, Recorder& recorder, Hooks hooks);
  DeviceOrders(const DeviceOrders&) = delete;
  DeviceOrders& operator=(const DeviceOrders&) = delete;

  // Any thread.

  /// Opens the device; has no effect if it is open. Throws UNSUPPORTED if a library or the device is missing.
  void open(const nccl::DeviceOptions& options);
  /// The device; null before it is open.
  std::shared_ptr<nccl::Device> device() const;
  bool is_open() const noexcept { return plane() != nullptr; }
  bool has_cpu_for_plane() const noexcept { return options_.has_cpu_for_plane; }

  // Only the driver's thread.

  /// Processes events of the plane. True if there were events.
  bool hear();
  TimePoint next_deadline() const;
  /// Orders an operation, on the coordinator, when all ranks of the set are ready for it.
  void order(Group& group, Execute execute);
  /// Accepts orders, on rank 0, from the coordinator of a new process set.
  void relay_to(std::int32_t process_set, std::vector<Rank> ranks);
  /// Passes on the next order of a process set, on rank 0.
  void on_order(Rank from, Execute execute);
  void on_execute(Rank from, Execute message);
  /// Handles a rank that has left. It has finished the first `executed` device operations of the set.
  void depart(Group& group, Rank rank, std::uint64_t executed);
  /// Handles the departure of rank 0: no more orders can arrive.
  void on_relay_end();
  /// True if the operation's order may still arrive from rank 0, although the coordinator sends no more orders.
  bool may_be_ordered(const Group& group, const Operation& operation) const;
  /// True when the ordered device operations of a removed process set have ended.
  bool is_done(const Group& group) const;
  void remove(const Group& group);
  bool has_some() const noexcept { return !on_plane_.empty(); }

  void abort();
  /// Stops the plane and ends every operation, at shutdown.
  void stop();

 private:
  // An operation that the plane has, in the order of the device. `operation` is null if this rank has joined.
  struct OnPlane {
    std::int32_t process_set = 0;
    std::uint64_t sequence = 0;
    std::shared_ptr<Operation> operation;
    std::string label;
    double timeout_s = 0;
    // Set only for the first operation, because the operations behind it wait for it.
    TimePoint since{};
    TimePoint deadline = kNever;
    TimePoint warn_at = kNever;
  };
  /// An error of NCCL. It becomes the engine's failure at the time `at`, unless the loss of a rank explains it earlier.
  struct DeviceFailure {
    Error error;
    TimePoint at{};
  };
  // A process set on rank 0, which passes on the set's orders in sequence.
  struct Relay {
    std::vector<Rank> ranks;
    std::uint64_t next = 0;
  };

  nccl::DevicePlane* plane() const noexcept { return plane_.load(std::memory_order_acquire); }
  void on_unique_id(std::int32_t process_set, const nccl::NcclUniqueId& id);
  void send_orders(Group& group);
  void refuse_orders(Group& group);
  void pass_on(const Team& team, Execute execute);
  std::shared_ptr<Operation> take_submitted(Group& group, const Execute& message);
  void hand_over(Group& group, const Execute& message, std::shared_ptr<Operation> operation);
  void check_time(TimePoint now);
  void watch_first();
  void warn_of_stall(TimePoint now);
  void on_done(const nccl::News::Done& done);
  void on_broken(const nccl::News::Broken& broken);
  void mark_for_abort(Group& group);
  void end_on_plane(bool is_device_busy) noexcept;

  const Options options_;
  Groups& groups_;
  InFlight& in_flight_;
  Peers& peers_;
  WakeupEvent& wakeup_;
  Recorder& recorder_;
  const Hooks hooks_;

  std::deque<OnPlane> on_plane_;
  TimePoint abort_deadline_ = kNever;  // then operations end without waiting for the plane
  TimePoint marked_deadline_ = kNever;
  std::optional<DeviceFailure> failure_;
  std::map<std::int32_t, DeviceFailure> broken_;  // errors of communicators, by process set
  std::map<std::int32_t, Relay> relays_;
  std::vector<std::pair<Rank, Execute>>
      held_;  // orders for sets that this rank has not created yet

  Mutex opening_;
  std::unique_ptr<nccl::DevicePlane> own_plane_ GUARDED_BY(opening_);
  std::atomic<nccl::DevicePlane*> plane_{nullptr};  // own_plane_, readable without the mutex
};

}  // namespace sparkhvd
