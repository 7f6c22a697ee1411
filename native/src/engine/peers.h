// The other ranks' connections: reading, writing, and ranks that have left or are lost.
//
// **Threads.** The driver's.
//
// **Ends.** A rank that leaves sends a goodbye. A connection for control frames that closes without one is the loss of its
// rank, which fails the engine. If only a connection for tensors closes, the rank has a moment to report the cause.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "engine/in_flight.h"
#include "message.h"
#include "recorder.h"
#include "stacks.h"
#include "transport/loss_watch.h"
#include "transport/poller.h"
#include "transport/wakeup_event.h"
#include "world.h"

namespace sparkhvd {

/// Receiver of the peers' frames.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  /// Handles frames, except about the connection itself. Throws Error if the peer cannot have sent it.
  virtual void on_frame(Rank from, FrameType type, std::span<const std::byte> body) = 0;
  /// A rank has answered a request for a sign of life, with the time of its last tensor bytes on a connection.
  virtual void on_life(Rank rank, TimePoint moved_at) = 0;
  /// The first connection for tensors has closed.
  virtual void on_data_end(Rank rank) = 0;
};

class Peers {
 public:
  Peers(World& world, Poller& poller, WakeupEvent& wakeup, InFlight& in_flight, Recorder& recorder,
        PeerEvents& events, Stacks& stacks, double host_loss_s);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  /// An epoll of the connections and the wakeup event.
  int fd() const noexcept { return poller_.fd(); }
  /// Watches all connections, before the first driver.
  void start();

  /// Reads and writes pending bytes, after at most `timeout_ms` (-1: unlimited). True if anything moved.
  bool poll(int timeout_ms, bool& interrupted);
  /// Reads connections in the next round, also if shared memory usually replaces them.
  void look_soon() noexcept { must_look_ = true; }
  bool take_look() noexcept { return std::exchange(must_look_, false); }
  /// Writes to writable connections: only frames, or tensors as well.
  bool flush(bool with_tensors);
  /// Finds ended processes of this host; their last frames are read first. True if there were any.
  bool look_for_ended();
  /// Fails the engine if a rank is lost.
  void check_time(TimePoint now);
  TimePoint next_deadline() const;

  /// True if the rank has sent a goodbye.
  bool has_left(Rank rank) const { return has_left_[static_cast<std::size_t>(index_of(rank))]; }
  void note_goodbye(Rank rank);
  /// Fails the engine, with the kind and `why` of a rank's loss.
  void lose(Rank peer, LossKind kind, const std::string& why);

  void send(Rank to, const Bytes& frame);
  /// Sends a frame to the other ranks among `to`. True if this rank is among them.
  bool send_to(std::span<const Rank> to, const Bytes& frame);
  /// Sends every other rank of the team its part of the order; returns this rank's.
  std::optional<Execute> send_order(Execute order, const Team& team);

  /// Requests the stacks of stragglers, as long as their engines are alive.
  void ask_for_stacks(const std::vector<Rank>& ranks);
  /// Requests a sign of life: `on_life` follows. False if the rank has left.
  bool ask_for_life(Rank rank);
  void answer_stack(Rank to, const StackRequest& request);
  void on_stack(Rank from, const Stack& message);

  /// After a failure: notifies every peer, and closes the connections for tensors.
  void part_with_all(const Bytes& last_words);
  /// Moves all connections to a GracefulClose.
  void leave();
  void after_fork() noexcept;

 private:
  /// A peer with a closed connection for tensors, and its deadline to report the cause.
  struct Suspect {
    TimePoint until;
    LossKind kind;
    std::string trouble;
  };
  enum class StackUse : std::uint8_t { kWarning, kSignOfLife };

  bool read(ControlLink& link);
  bool read(DataLink& link);
  bool flush(ControlLink& link);
  void on_event(ControlLink& link, bool is_writable, bool is_readable, bool& moved);
  void on_event(DataLink& link, bool is_writable, bool is_readable, bool& moved);
  void on_end(ControlLink& link);
  void on_end(DataLink& link);
  static LossKind kind_of(const Link& link);
  void suspect(const DataLink& link);
  void part_with(ControlLink& link);
  template <class AnyLink>
  void watch(const AnyLink& link);
  template <class AnyLink>
  void unwatch(const AnyLink& link);
  std::size_t index_of_link(const ControlLink& link) const;
  std::size_t index_of_link(const DataLink& link) const;

  World& world_;
  // Reports the wakeup event, or a connection by its index: connections for control frames by rank, then
  // connections for tensors.
  Poller& poller_;
  WakeupEvent& wakeup_;
  InFlight& in_flight_;
  Recorder& recorder_;
  PeerEvents& events_;
  Stacks& stacks_;
  std::vector<std::optional<std::uint32_t>> watched_;  // epoll events by connection
  std::vector<Link*> with_frames_;   // links for control frames with something to write
  std::vector<Link*> with_tensors_;  // links for tensors
  std::vector<bool> has_left_;
  std::map<Rank, Suspect> suspects_;
  LossWatch loss_watch_;
  std::map<Rank, std::deque<StackUse>> stack_requests_;  // not answered yet
  bool must_look_ = false;
};

}  // namespace sparkhvd
