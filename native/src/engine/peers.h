// The connections to the other ranks: reading, writing, and ranks that leave or are lost.
//
// **Threads.** Only the driver's thread uses it.
//
// **Ends.** A rank that leaves sends a goodbye. If a connection for control frames closes without a goodbye, its rank
// is lost and the engine fails. If only a connection for tensors closes, the rank has a moment to report the cause.
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

/// Interface of the part that handles the peers' frames.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  /// Handles a frame. Throws Error if the peer may not send it.
  virtual void on_frame(Rank from, FrameType type, std::span<const std::byte> body) = 0;
  /// Handles a rank's sign of life. `moved_at`: time of its last tensor bytes on a connection.
  virtual void on_life(Rank rank, TimePoint moved_at) = 0;
  /// Handles the end of the rank's first connection for tensors.
  virtual void on_data_end(Rank rank) = 0;
};

class Peers {
 public:
  Peers(World& world, Poller& poller, WakeupEvent& wakeup, InFlight& in_flight, Recorder& recorder,
        PeerEvents& events, Stacks& stacks, double host_loss_s);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  /// Descriptor of an epoll instance with the connections and the wakeup event.
  int fd() const noexcept { return poller_.fd(); }
  /// Watches all connections, before the first driver.
  void start();

  /// Waits at most `timeout_ms` (-1: without limit) for events, then reads and writes. True if anything changed.
  bool poll(int timeout_ms, bool& interrupted);
  /// Makes the next round read the connections, even if all frames normally use shared memory.
  void look_soon() noexcept { must_look_ = true; }
  bool take_look() noexcept { return std::exchange(must_look_, false); }
  /// Writes pending control frames, and tensors if `with_tensors`, as far as the connections have room.
  bool flush(bool with_tensors);
  /// Finds ended processes of this host and reads their last frames. True if it read frames or lost a rank.
  bool look_for_ended();
  /// Fails the engine if the time limit of a silent host or of a suspect is over.
  void check_time(TimePoint now);
  TimePoint next_deadline() const;

  /// True if the rank has sent a goodbye.
  bool has_left(Rank rank) const { return has_left_[static_cast<std::size_t>(index_of(rank))]; }
  void note_goodbye(Rank rank);
  /// Records the loss of a rank and fails the engine. `why` is the cause for the message.
  void lose(Rank peer, LossKind kind, const std::string& why);

  void send(Rank to, const Bytes& frame);
  /// Sends a frame to the other ranks among `to`. True if this rank is among them.
  bool send_to(std::span<const Rank> to, const Bytes& frame);
  /// Sends every other rank of the team its part of the order; returns this rank's.
  std::optional<Execute> send_order(Execute order, const Team& team);

  /// Requests the stacks of stragglers for the warning on stderr.
  void ask_for_stacks(const std::vector<Rank>& ranks);
  /// Requests a sign of life; the answer causes a call of `on_life`. False if the rank has left.
  bool ask_for_life(Rank rank);
  void answer_stack(Rank to, const StackRequest& request);
  void on_stack(Rank from, const Stack& message);

  /// Sends `last_words` to every peer after a failure, and closes the connections for tensors.
  void part_with_all(const Bytes& last_words);
  /// Moves all connections to a GracefulClose.
  void leave();
  void after_fork() noexcept;

 private:
  /// A peer with a closed connection for tensors. It may report the cause until the time `until`.
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
  // Reports the wakeup event, or the index of a connection: first connections for control frames by rank, then
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
