// Operations on devices: one order for all process sets, launched by the plane, finished when the device has finished.
//
// Two communicators that launch in different orders on two ranks deadlock. So there is one order: a process set's
// coordinator decides the next operation and sends it to rank 0, which passes it on. A rank launches in the order of
// rank 0's connection.
//
// **Threads.** The driver's, except `open`, `device` and `is_open`.
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
    bool has_cpu_for_plane = false;  // besides the caller's, on a host with this many ranks
  };
  /// Effects of a process set's orders on its other operations.
  struct Hooks {
    /// A waiting operation will not get an order.
    std::function<void(const Refuse&)> refuse;
    /// An order has arrived, or will not: operations that waited for it may end.
    std::function<void(Group&)> settle;
    /// A thread may wait for a launch.
    std::function<void()> launched;
  };
  DeviceOrders(const Options& options, Groups& groups, InFlight& in_flight, Peers& peers,
               WakeupEvent& wakeup, Recorder& recorder, Hooks hooks);
  DeviceOrders(const DeviceOrders&) = delete;
  DeviceOrders& operator=(const DeviceOrders&) = delete;

  // Any thread.

  /// Throws UNSUPPORTED if a library or the device is missing; has no effect if it is open.
  void open(const nccl::DeviceOptions& options);
  /// Null before it is open.
  std::shared_ptr<nccl::Device> device() const;
  bool is_open() const noexcept { return plane() != nullptr; }
  bool has_cpu_for_plane() const noexcept { return options_.has_cpu_for_plane; }

  // The driver's.

  /// Processes events of the plane. True if there were any.
  bool hear();
  TimePoint next_deadline() const;
  /// The coordinator: all ranks of the set are ready for this.
  void order(Group& group, Execute execute);
  /// Rank 0: a new process set, whose first rank sends it orders.
  void relay_to(std::int32_t process_set, std::vector<Rank> ranks);
  /// Rank 0: the coordinator of a process set has sent the next order.
  void on_order(Rank from, Execute execute);
  void on_execute(Rank from, Execute message);
  /// A rank has left, after finishing these device operations.
  void depart(Group& group, Rank rank, std::uint64_t executed);
  /// Rank 0 has left, and passes on no more orders.
  void on_relay_end();
  /// True if the operation's order may still arrive although the coordinator orders nothing more.
  bool may_be_ordered(const Group& group, const Operation& operation) const;
  /// True when the ordered device operations of a removed process set have ended.
  bool is_done(const Group& group) const;
  void remove(const Group& group);
  bool has_some() const noexcept { return !on_plane_.empty(); }

  void abort();
  /// At shutdown: afterwards the plane has stopped, and every operation has ended.
  void stop();

 private:
  // Operations of the plane, in the order of the device; null: this rank has joined.
  struct OnPlane {
    std::int32_t process_set = 0;
    std::uint64_t sequence = 0;
    std::shared_ptr<Operation> operation;
    std::string label;
    double timeout_s = 0;
    // Of the first: the others wait for it.
    TimePoint since{};
    TimePoint deadline = kNever;
    TimePoint warn_at = kNever;
  };
  /// Error of NCCL; becomes the engine's failure at its deadline, unless explained by then.
  struct DeviceFailure {
    Error error;
    TimePoint at{};
  };
  // Rank 0's: process sets by coordinator, whose orders it passes on in sequence.
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
  TimePoint abort_deadline_ = kNever;  // then operations on the plane end without it
  TimePoint marked_deadline_ = kNever;
  std::optional<DeviceFailure> failure_;
  std::map<std::int32_t, DeviceFailure> broken_;  // communicators by process set
  std::map<std::int32_t, Relay> relays_;
  std::vector<std::pair<Rank, Execute>>
      held_;  // orders for sets that this rank has not created yet

  Mutex opening_;
  std::unique_ptr<nccl::DevicePlane> own_plane_ GUARDED_BY(opening_);
  std::atomic<nccl::DevicePlane*> plane_{nullptr};  // the same, for its users
};

}  // namespace sparkhvd
