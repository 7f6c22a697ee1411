// Runs collective operations: sends each to the coordinator of its process set, negotiates it, runs it in the
// negotiated order and finishes it. It also creates and removes process sets.
//
// **Threads.** Only the driver's thread uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "collectives/collectives.h"
#include "engine/device_orders.h"
#include "engine/group.h"
#include "engine/in_flight.h"
#include "engine/peers.h"
#include "kernels/kernels.h"
#include "point_to_point/point_to_point.h"
#include "recorder.h"
#include "world.h"

namespace sparkhvd {

class ProcessSets {
 public:
  /// The parts of the engine that operations use.
  struct Parts {
    World& world;
    const Kernels& kernels;
    InFlight& in_flight;
    Peers& peers;
    PointToPoint& messages;
    DeviceOrders& devices;
    Groups& groups;
    Recorder& recorder;
  };
  ProcessSets(const Parts& parts, double stall_warning_s);
  ProcessSets(const ProcessSets&) = delete;
  ProcessSets& operator=(const ProcessSets&) = delete;

  /// Opens process set 0, which has all ranks.
  void open_world();
  /// Takes a collective operation that this rank has submitted.
  void submit(std::shared_ptr<Operation> operation);
  void refuse_removed(Operation& operation);

  /// Receives frames through shared memory. True if there were frames.
  bool receive_shared();
  /// Sends the plan's numbers that are not sent yet. Shared memory sends them at once; a connection collects them until
  /// there are many, or until `waits_for_no_more`. False if there were no numbers.
  bool tell(bool waits_for_no_more);
  // Handlers of frames from a connection. They throw Error if the peer may not send the frame.
  void on_ready(Rank from, Ready message);
  void on_execute(Rank from, Execute message);
  void on_ready_again(Rank from, const ReadyAgain& message);
  void on_execute_again(Rank from, const ExecuteAgain& message);
  void on_refuse(Rank from, const Refuse& message);
  void on_credit(Rank from, const Credit& message);
  void on_offer(Rank from, const SegmentOffer& message);
  void on_mapped(Rank from, const SegmentMapped& message);

  /// Advances negotiated operations. True if an operation advanced.
  bool run();
  bool is_running() const;
  /// True if all frames between the ranks normally use shared memory.
  bool is_all_shared() const;
  /// True if a peer may send frames through shared memory.
  bool listens() const;
  TimePoint next_deadline() const;
  void check_time(TimePoint now);

  /// Handles a rank's sign of life: the operations that requested it continue to wait. `moved_at`: time of its last
  /// bytes.
  void note_life(Rank rank, TimePoint moved_at);
  /// Handles a rank that has left. `goodbye` has the operations that it has finished.
  void depart(Rank rank, const Goodbye& goodbye);
  /// Refuses operations that still wait for an order, if the coordinator's last order has arrived.
  void settle(Group& group);
  /// The goodbye of this rank, with the numbers of operations that it has finished.
  Goodbye goodbye() const;
  /// Releases all operations and their memory, because the engine has failed or leaves. It does not end the operations.
  void let_go() noexcept;
  /// Ends the negotiations of the process sets that this rank coordinates.
  void stop_deciding() noexcept;

 private:
  Group& open(std::unique_ptr<Group> group);
  void announce(const Team& team, std::int32_t process_set);
  void place(Group& group, Operation& operation);
  bool place_in_buffer(Group& group, Operation& operation);
  bool hear_next(Group& group, ControlReader& reader);
  void check_shares(Rank from, const SegmentKey& key, std::size_t outstanding,
                    std::size_t limit) const;
  void apply(Group& group, Negotiation::Outcome outcome);
  void give_order(Group& group, Execute order);
  Group& coordinated(std::int32_t process_set, Rank from);
  Group& followed(std::int32_t process_set, Rank from);
  void refuse_closed(Rank to, const Group& group, Collective collective, const std::string& name);
  void count_order(Group& group, std::uint64_t sequence);
  void agree(Group& group, Execute message);
  void submit_again(Group& group, std::uint32_t number);
  void give_order_again(Group& group, const Again& order);
  void run_again(Group& group, std::uint32_t number, std::uint64_t sequence);
  void tell(Group& group);
  void pass_over(Group& group, Execute message);
  void start_later(Group& group, const std::shared_ptr<Operation>& operation, Execute message);
  void resolve_places(Group& group, const Team& team, Operation& operation, const Execute& message);

  bool run_first(Group& group);
  bool go_on(Running& running);
  void begin(Group& group, Running& running);
  void conclude(Group& group, Running& running);
  void keep_buffer(Operation& operation, std::shared_ptr<Segment> segment);
  void complete_group(Group& group, const Operation& operation, Context& context);
  void add_group(Group& group, Running& running);
  void remove_group(Running& running);
  void configure(Group& group, const Operation& operation);

  bool check_running(Group& group, TimePoint now);
  bool check_submitted(Group& group, TimePoint now);
  bool may_wait_longer(const Group& group, Operation& operation);
  void depart(Group& group, Rank rank, std::uint64_t executed);
  void abandon_group(const Operation& operation, Rank departed);
  void announce_end(Group& group, std::int32_t status, const std::string& text);
  void close_group(Group& group, std::int32_t status, const std::string& text);
  void end_closed(Group& group);
  void refuse_after_coordinator(Group& group);

  World& world_;
  const Kernels& kernels_;
  InFlight& in_flight_;
  Peers& peers_;
  PointToPoint& messages_;
  DeviceOrders& devices_;
  Groups& groups_;
  Recorder& recorder_;
  const double stall_warning_s_;
  const AskForLife ask_for_life_;
  std::vector<std::weak_ptr<Segment>> buffers_;  // memory that this rank has registered
  bool has_unsent_ = false;                      // a process set has numbers to send
};

}  // namespace sparkhvd
