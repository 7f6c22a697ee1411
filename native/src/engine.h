// The engine of one rank: takes submissions, agrees on them with the other ranks, and drives the
// collectives.
//
// **Threads.** Any number of callers and one progress thread. At most one of them is the *driver*
// at a time: only the driver touches connections, negotiation and running collectives. A waiting
// thread becomes the driver if there is none; the progress thread drives when no thread waits. While a
// caller drives, the progress thread sleeps undisturbed, because its epoll does not watch the
// connections then; once no caller has come back for a fraction of a millisecond, a timer wakes it.
// A submission drives just far enough to tell the other ranks.
//
// **Ownership.** `mutex_` guards what callers and the driver share (inbox, names, failure, who
// drives); all else belongs to the driver. An Operation's result is written before its status is.
//
// **Shutdown.** The driver says goodbye on every connection, lets the peers read it, and closes;
// then the progress thread is joined. A failure cancels everything that lends memory before any
// caller learns of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/collectives.h"
#include "error.h"
#include "group.h"
#include "kernels/kernels.h"
#include "nccl/plane.h"
#include "negotiation.h"
#include "operation.h"
#include "point_to_point/point_to_point.h"
#include "recorder.h"
#include "stacks.h"
#include "transport/bell.h"
#include "transport/loss_watch.h"
#include "transport/poller.h"
#include "world.h"

namespace sparkhvd {

/// Error of every call on an engine in a process forked after its creation.
Error created_before_fork();

struct EngineOptions {
  WorldOptions world;
  std::vector<Fd> sockets;  // by rank, once per stream
  std::int32_t isa = SPARKHVD_ISA_AUTO;
  std::int32_t spin_us = 0;
  double stall_warning_s = 0;
  double stall_shutdown_s = 0;
  double host_loss_s = 0;
  int stack_signal = 0;  // see stacks.h
  int stack_pipe = -1;
};

class Engine {
 public:
  /// Collective; throws TIMEOUT, PEER_LOST or MISMATCH naming the rank.
  explicit Engine(EngineOptions options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  Rank rank() const noexcept { return rank_; }
  std::size_t size() const noexcept { return size_; }
  const WorldOptions& world_options() const noexcept { return world_->options(); }
  /// The ranks of a process set, ascending. Throws InvalidArgument if it does not exist or this rank
  /// is not in it.
  std::shared_ptr<const std::vector<Rank>> members(std::int32_t process_set) const;
  double stall_shutdown_s() const noexcept { return stall_shutdown_s_; }

  /// Throws UNSUPPORTED if a library or the device is missing; nothing happens if it is open.
  void open_device(const nccl::DeviceOptions& options);
  /// Null before it is open.
  std::shared_ptr<nccl::Device> device() const;

  /// Throws InvalidArgument for a name in flight, else what made the engine unusable.
  void submit(std::shared_ptr<Operation> operation);
  /// Drives until the operation is finished, `deadline`, or a signal.
  void wait(Operation& operation, TimePoint deadline);
  /// The same until it has been handed to the device, or has ended.
  void wait_launched(Operation& operation, TimePoint deadline);
  /// Submits and waits, without a change of drivers in between.
  void run(std::shared_ptr<Operation> operation, TimePoint deadline);
  Recorder& recorder() noexcept { return recorder_; }
  void shutdown();
  void abort(const std::string& reason);
  /// Throws why the engine is not usable.
  void check() const;
  void after_fork() noexcept;
  bool is_forked_copy() const noexcept { return is_forked_copy_.load(std::memory_order_relaxed); }

 private:
  enum class Work { kControl, kAll };
  // What `poller_` tells of: the bell, or a connection by its index: those for control frames by rank,
  // then those for tensors.
  static constexpr std::uint64_t kBellKey = UINT64_MAX;
  // What the progress thread waits for.
  static constexpr std::uint64_t kNestedKey = 0;
  static constexpr std::uint64_t kControlKey = 1;
  static constexpr std::uint64_t kTimerKey = 2;

  void choose_spinning();
  // The driver. `lock` holds mutex_.
  void accept(const std::unique_lock<std::mutex>& lock, std::shared_ptr<Operation> operation);
  using Reached = bool (*)(const Operation&);
  void wait(std::unique_lock<std::mutex>& lock, Operation& operation, TimePoint deadline,
            Reached reached);
  void become_driver(const std::unique_lock<std::mutex>& lock);
  void stop_driving(const std::unique_lock<std::mutex>& lock);
  void start_timer(const std::unique_lock<std::mutex>& lock);
  void run_progress_thread();
  bool progress_until_idle(bool is_called);

  // Everything below is called by the driver.
  bool step(Work work);
  bool try_step(Work work) noexcept;
  Clock::duration spin_time() const;
  bool sleep_until(TimePoint deadline);
  bool announce_sleep();
  bool take_inbox();
  bool poll_links(int timeout_ms, bool& interrupted);
  bool read_link(ControlLink& link);
  bool read_data(DataLink& link);
  bool flush(ControlLink& link);
  bool flush_links(Work work = Work::kAll);
  template <class AnyLink>
  void watch(const AnyLink& link) {
    watch(link, index_of_link(link), EPOLLIN | (link.wants_write() ? EPOLLOUT : 0U));
  }
  void watch(const Link& link, std::size_t index, std::uint32_t events);
  void unwatch(const Link& link, std::size_t index);
  std::size_t index_of_link(const ControlLink& link) const;
  std::size_t index_of_link(const DataLink& link) const;
  bool run_operations();
  bool run_first(Group& group);
  bool go_on(Running& running);
  bool is_running() const;
  bool check_time();
  bool check_time(Group& group, TimePoint now);
  TimePoint next_deadline() const;
  TimePoint next_look() const;
  bool look_for_ended();

  void handle(ControlLink& link, FrameType type, std::span<const std::byte> body);
  void on_credit(Rank from, const Credit& message);
  void apply(Group& group, Negotiation::Outcome outcome);
  bool send_to(std::span<const Rank> to, const Bytes& frame);
  void give_order(Group& group, Execute order);
  std::optional<Execute> send_order(Execute order, const Team& team);
  Group* find_group(std::int32_t process_set);
  void open_group(std::unique_ptr<Group> group);
  void check_shares(Rank from, const SegmentKey& key, std::size_t outstanding,
                    std::size_t limit) const;
  void on_offer(Rank from, const SegmentOffer& message);
  void on_mapped(Rank from, const SegmentMapped& message);
  void announce(const Team& team, std::int32_t process_set);
  void on_ready(Rank from, Ready message);
  void on_execute(Rank from, Execute message);
  void on_refuse(Rank from, const Refuse& message);
  void on_goodbye(Rank from, const Goodbye& message);
  void on_link_end(ControlLink& link);
  void on_data_end(DataLink& link);
  void look_for_losses(TimePoint now);
  void lose(Rank peer, const std::string& why);
  bool receive_shared();
  bool receive_messages();
  bool hear_next(Group& group, ControlReader& reader);
  bool is_all_shared() const;
  bool listens() const;
  void ask_for_stacks(const std::vector<Rank>& ranks);
  void on_stack(Rank from, const Stack& message);
  bool asks_for_life(const Group& group, Operation& operation, TimePoint now);
  void note_life(Rank rank);
  void depart(Group& group, Rank rank, std::uint64_t executed);
  void refuse_after_coordinator(Group& group);

  // The life of an operation.
  void submit_to(Group& group, std::shared_ptr<Operation> operation);
  void place(Group& group, Operation& operation);
  void pass_over(Group& group, Execute message);
  void check_contributors(const Group& group, const Execute& message) const;
  void check_order(const Group& group, const Operation& operation, const Execute& message) const;
  void resolve_places(Group& group, const Team& team, Operation& operation, const Execute& message);
  void begin(Group& group, Running& running);
  void conclude(Group& group, Running& running);
  void add_group(Group& group, Running& running);
  void remove_group(Running& running);
  void announce_end(Group& group, std::int32_t status, const std::string& text);
  void close_group(Group& group, std::int32_t status, const std::string& text);
  void abandon_group(const Operation& operation, Rank departed);
  void configure(Group& group, const Operation& operation);

  // Operations on devices (engine_device.cc).
  nccl::DevicePlane* plane() const noexcept { return plane_.load(std::memory_order_acquire); }
  bool hear_device();
  void check_device_time(TimePoint now);
  TimePoint next_device_deadline() const;
  void order_on_device(Group& group, Execute execute);
  void send_device_orders(Group& group);
  void on_unique_id(std::int32_t process_set, const nccl::NcclUniqueId& id);
  void on_order(Rank from, Execute execute);
  void pass_on(const Team& team, Execute execute);
  void relay_to(std::int32_t process_set, std::vector<Rank> ranks);
  void on_device_execute(Rank from, Execute message);
  std::shared_ptr<Operation> take_submitted(Group& group, const Execute& message);
  void hand_over(Group& group, const Execute& message, std::shared_ptr<Operation> operation);
  void watch_first();
  void warn_of_stall(TimePoint now);
  void on_device_done(const nccl::News::Done& done);
  void on_broken(const nccl::News::Broken& broken);
  void mark_for_abort(Group& group);
  void end_on_plane() noexcept;
  void abort_device();
  void stop_device();
  void depart_on_device(Group& group, Rank rank, std::uint64_t executed);
  void refuse_orders(Group& group);
  void on_relay_end();
  bool may_be_ordered(const Group& group, const Operation& operation) const;
  void settle_device(Group& group);
  bool is_device_done(const Group& group) const;

  void finish(Operation& operation, std::int32_t status, std::string message);
  void fail(std::int32_t status, const std::string& message) noexcept;
  void fail_and_tell(std::int32_t status, const std::string& message);
  void fail_all(std::int32_t status, const std::string& message);
  void part_with(ControlLink& link);
  void warn(const std::string& text) const;
  void say_goodbye();
  void leave() noexcept;
  void fail_without_memory() noexcept;
  void end_without_memory(Operation& operation) noexcept;
  template <class Body>
  bool protect(Body body) noexcept;
  bool part_with_all();

  const Rank rank_;
  const std::size_t size_;
  const Kernels& kernels_;
  Clock::duration spin_;
  const double stall_shutdown_s_;
  Recorder recorder_;
  Stacks stacks_;
  Bell bell_;
  Poller poller_;        // connections and the bell
  Poller outer_poller_;  // for the progress thread: `poller_`, while no other thread drives
  Fd control_;           // wakes the progress thread itself
  Fd timer_;             // wakes it when a caller has stopped driving and does not come back
  const double stall_warning_s_;
  Error out_of_memory_;  // there when nothing can be made any more
  std::optional<World> world_;
  std::optional<PointToPoint> messages_;  // the driver's

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Operation>> inbox_;
  // Every operation that is not finished, by process set and name; but of those that the device has
  // been given, at most the last of a name.
  std::map<std::pair<std::int32_t, std::string>, std::shared_ptr<Operation>> in_flight_;
  std::map<std::int32_t, std::shared_ptr<const std::vector<Rank>>> members_;
  std::optional<Error> failure_;
  std::vector<Rank> departed_;
  std::optional<std::string> abort_request_;
  std::size_t waiters_ = 0;
  bool has_driver_ = false;
  bool driver_sleeps_ = false;
  bool is_stopping_ = false;
  bool is_shut_down_ = false;
  bool is_timer_running_ = false;
  bool is_timer_idle_ = false;  // it runs for the longer time
  std::uint64_t drives_ = 0;    // how often a caller has stopped driving
  bool is_watching_ = true;     // the progress thread's epoll watches `poller_`
  std::atomic<bool> is_forked_copy_{false};
  std::atomic<bool> hand_over_{false};  // a caller waits for the progress thread to stop driving

  // The driver's.
  std::map<std::int32_t, std::unique_ptr<Group>> groups_;  // that this rank is in
  std::int32_t next_process_set_ = 1;
  std::vector<std::weak_ptr<Segment>> buffers_;        // registered by this rank
  std::vector<std::optional<std::uint32_t>> watched_;  // epoll events by connection
  std::vector<bool> said_goodbye_;
  LossWatch loss_watch_;
  /// A peer whose connection for tensors has ended, and that must say why until then.
  struct Suspect {
    TimePoint until;
    std::string trouble;
  };
  std::map<Rank, Suspect> suspects_;
  enum class StackUse : std::uint8_t { kWarning, kSignOfLife };
  std::map<Rank, std::deque<StackUse>> stack_requests_;  // not answered yet
  bool has_failed_ = false;
  std::uint32_t steps_ = 0;
  bool must_look_ = false;          // at the connections, in this step
  bool is_crowded_ = false;         // this host has more ranks than CPUs for them
  bool has_cpu_for_plane_ = false;  // besides the one of its caller, on a host with as many ranks
  std::uint32_t max_failed_spins_ = 0;
  std::uint32_t failed_spins_ = 0;  // waiters' spins in a row that ended in sleep

  // Operations that the plane has, in the order of the device; null: of others, this rank has joined.
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
  std::deque<OnPlane> on_plane_;
  TimePoint abort_deadline_ = kNever;  // then operations on the plane end without it
  TimePoint marked_deadline_ = kNever;
  /// Error of NCCL; becomes the engine's failure then, if nothing explains it by that time.
  struct DeviceFailure {
    Error error;
    TimePoint at{};
  };
  std::optional<DeviceFailure> device_failure_;
  std::map<std::int32_t, DeviceFailure> broken_;  // communicators by process set
  // Rank 0's: process sets by whose coordinator it is told what to pass on, in order.
  struct Relay {
    std::vector<Rank> ranks;
    std::uint64_t next = 0;
  };
  std::map<std::int32_t, Relay> relays_;
  std::vector<std::pair<Rank, Execute>> held_orders_;  // for sets that this rank has yet to make

  std::mutex device_mutex_;                       // of opening
  std::unique_ptr<nccl::DevicePlane> own_plane_;  // guarded by device_mutex_ until `plane_` has it
  std::atomic<nccl::DevicePlane*> plane_{nullptr};

  std::mutex shutdown_mutex_;
  std::jthread thread_;
};

}  // namespace sparkhvd
