// The other ranks' connections: what is read and written when, who has left, and who is lost.
//
// **Threads.** The driver's.
//
// **Ends.** A rank that leaves says goodbye; a connection for control frames that ends without one is the loss of its
// rank, which fails the engine. A connection for tensors that ends alone gets a moment in which the rank may say why.
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

/// What others make of what peers say.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  /// A frame that is not about the connection itself. Throws Error if the peer cannot have sent it.
  virtual void on_frame(Rank from, FrameType type, std::span<const std::byte> body) = 0;
  /// A rank has answered a question for a sign of life, and when it moved tensor bytes on a connection last.
  virtual void on_life(Rank rank, TimePoint moved_at) = 0;
  /// The first connection for tensors has ended.
  virtual void on_data_end(Rank rank) = 0;
};

class Peers {
 public:
  Peers(World& world, Poller& poller, WakeupEvent& wakeup, InFlight& in_flight, Recorder& recorder,
        PeerEvents& events, Stacks& stacks, double host_loss_s);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  /// An epoll of the connections and the wakeup.
  int fd() const noexcept { return poller_.fd(); }
  /// Watches all connections, before the first driver.
  void start();

  /// Reads and writes what there is, after at most `timeout_ms` (-1: as long as it takes). True if anything moved.
  bool poll(int timeout_ms, bool& interrupted);
  /// Reads connections in the next round, also where shared memory makes up for them.
  void look_soon() noexcept { must_look_ = true; }
  bool take_look() noexcept { return std::exchange(must_look_, false); }
  /// Writes what the connections take: frames alone, or tensors as well.
  bool flush(bool with_tensors);
  /// Finds processes of this host that have ended; what they said last is read first. True if there was any.
  bool look_for_ended();
  /// Fails the engine if a rank is lost.
  void check_time(TimePoint now);
  TimePoint next_deadline() const;

  /// True if the rank has said goodbye.
  bool has_left(Rank rank) const { return has_left_[static_cast<std::size_t>(index_of(rank))]; }
  void note_goodbye(Rank rank);
  /// Fails the engine: how and `why` a rank is lost.
  void lose(Rank peer, LossKind kind, const std::string& why);

  void send(Rank to, const Bytes& frame);
  /// Sends a frame to the other ranks among `to`. True if this one is among them.
  bool send_to(std::span<const Rank> to, const Bytes& frame);
  /// Sends every other rank of the team what it needs of the order; returns what this one needs.
  std::optional<Execute> send_order(Execute order, const Team& team);

  /// Ranks that keep others waiting show their stacks, as long as their engines are alive.
  void ask_for_stacks(const std::vector<Rank>& ranks);
  /// Asks for a sign of life: `on_life` follows. False if the rank has left.
  bool ask_for_life(Rank rank);
  void answer_stack(Rank to, const StackRequest& request);
  void on_stack(Rank from, const Stack& message);

  /// After a failure: tells every peer, and ends the connections for tensors.
  void part_with_all(const Bytes& last_words);
  /// Hands the connections over to a GracefulClose; there are none any more.
  void leave();
  void after_fork() noexcept;

 private:
  /// A peer whose connection for tensors has ended, and that must say why until then.
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
  // Tells of the wakeup, or of a connection by its index: those for control frames by rank, then those
  // for tensors.
  Poller& poller_;
  WakeupEvent& wakeup_;
  InFlight& in_flight_;
  Recorder& recorder_;
  PeerEvents& events_;
  Stacks& stacks_;
  std::vector<std::optional<std::uint32_t>> watched_;  // epoll events by connection
  std::vector<Link*> with_frames_;   // links for control frames with something to write
  std::vector<Link*> with_tensors_;  // those for tensors
  std::vector<bool> has_left_;
  std::map<Rank, Suspect> suspects_;
  LossWatch loss_watch_;
  std::map<Rank, std::deque<StackUse>> stack_requests_;  // not answered yet
  bool must_look_ = false;
};

}  // namespace sparkhvd
