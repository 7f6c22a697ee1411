// The parts that the driver drives (peers, process sets, devices and messages), and their behaviour when the engine
// fails.
//
// **Threads.** Only the driver's thread calls it, except for the functions under "Any thread".
//
// **Shutdown.** `leave` ends operations in flight and lets the peers read the goodbye before connections close. A
// failure releases all memory lent to connections before any caller is notified.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "engine/device_orders.h"
#include "engine/driver.h"
#include "engine/group.h"
#include "engine/in_flight.h"
#include "engine/peers.h"
#include "engine/process_sets.h"
#include "point_to_point/point_to_point.h"
#include "recorder.h"
#include "stacks.h"
#include "transport/wakeup_event.h"
#include "world.h"

namespace sparkhvd {

struct EngineOptions {
  WorldOptions world;
  std::vector<Fd> sockets;  // by rank, once per stream
  std::int32_t isa = SPARKHVD_ISA_AUTO;
  std::int32_t spin_us = 0;
  double stall_warning_s = 0;
  double stall_shutdown_s = 0;
  double host_loss_s = 0;
  int stack_signal = 0;  // this and `stack_pipe`: see stacks.h
  int stack_pipe = -1;
};

class Core final : public Drivable, private PeerEvents, private Failing {
 public:
  /// Connects to the other ranks; all ranks must call it. Throws TIMEOUT, PEER_LOST or MISMATCH with the rank. It calls
  /// `notify` when the wait condition of a thread may hold.
  Core(EngineOptions options, const std::function<void()>& notify);

  // Any thread.
  InFlight& in_flight() noexcept { return in_flight_; }
  const InFlight& in_flight() const noexcept { return in_flight_; }
  DeviceOrders& devices() noexcept { return devices_; }
  const DeviceOrders& devices() const noexcept { return devices_; }
  Recorder& recorder() noexcept { return recorder_; }
  WakeupEvent& wakeup() noexcept { return wakeup_; }
  const World& world() const noexcept { return world_; }
  /// Descriptor of an epoll instance that reports pending work.
  int connections() const noexcept { return peers_.fd(); }
  Spinning spinning() const noexcept { return spinning_; }

  bool step(Work work) noexcept override;
  void look() noexcept override;
  bool sleep(TimePoint deadline, bool& interrupted) noexcept override;
  bool is_running() const override { return sets_.is_running(); }
  bool expects_bell() const override;
  TimePoint wake_up() const override;
  bool has_requests() const override { return in_flight_.has_requests(); }
  bool is_idle() const override { return in_flight_.is_idle(); }

  /// Leaves the job. The last driver calls it. If it fails, the peers see closed connections without a goodbye.
  void leave() noexcept;
  void after_fork() noexcept;

 private:
  Core(EngineOptions options, const std::function<void()>& notify,
       std::vector<std::string> warnings);
  bool move(Work work);
  bool move_operations();
  bool take_requests();
  void submit(std::shared_ptr<Operation> operation);
  bool receive_messages();
  TimePoint next_deadline() const;
  TimePoint next_look() const;
  bool check_time();
  void on_goodbye(Rank from, const Goodbye& message);
  void say_goodbye();
  void end_all(std::int32_t status, const std::string& message);
  template <class Body>
  bool protect(Body body) noexcept;

  void on_frame(Rank from, FrameType type, std::span<const std::byte> body) override;
  void on_life(Rank rank, TimePoint moved_at) override {
    sets_.note_life(rank, moved_at);
    messages_.note_life(rank, moved_at);
  }
  void on_data_end(Rank rank) override { messages_.on_data_end(rank); }
  void spread(std::int32_t status, const std::string& message) override;
  void let_go() noexcept override;

  const Kernels& kernels_;
  Recorder recorder_;
  WakeupEvent wakeup_;
  // Their descriptors are created before the ranks connect, so that a lack of descriptors fails early.
  Poller poller_;
  Stacks stacks_;
  World world_;
  const Spinning spinning_;
  InFlight in_flight_;
  Peers peers_;
  PointToPoint messages_;
  Groups groups_;
  DeviceOrders devices_;
  ProcessSets sets_;
  std::uint32_t steps_ = 0;
};

}  // namespace sparkhvd
