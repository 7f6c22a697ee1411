// Messages from one rank to another (send and receive). Unlike collectives they are not negotiated: they run beside
// collectives in any order, and no third rank takes part.
//
// A small message is sent at once, with its bytes. The sender of a larger message announces the size. When a receive
// matches, the receiver accepts the message, and the bytes move from tensor to tensor in the order of acceptance.
// Inside a host, frames and bytes use lanes in shared memory. Between hosts, frames use the connection for control
// frames, and bytes use a connection for tensors as a separate stream.
//
// **Threads.** Only the driver's thread uses it.
//
// **Ownership.** The caller lends a tensor until its operation is finished. The receiver keeps unmatched small
// messages, up to kEagerInFlight bytes from each sender, but only the announcements of large messages.
//
// **Ends.** A message without a matching receive in time is withdrawn, and only its operation fails. If bytes stop in
// the middle of a message, the engine fails, as in a collective.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "message.h"
#include "operation.h"
#include "point_to_point/lane.h"
#include "point_to_point/matching.h"
#include "world.h"

namespace sparkhvd {

class PointToPoint {
 public:
  /// Number of the stream of message bytes on connections for tensors. CREDIT frames have it in place of a process set.
  static constexpr std::int32_t kStream = -1;
  /// Messages up to this size are sent at once. Inside a host they must also fit into a record of the lane.
  static constexpr std::size_t kEagerBytes = 64 << 10;
  /// Limit of the bytes of small messages that were sent and that the receiver has not taken yet.
  static constexpr std::uint64_t kEagerInFlight = 512 << 10;

  using Finish = std::function<void(Operation&, std::int32_t status, std::string message)>;
  PointToPoint(World& world, Finish finish, AskForLife ask_for_life);

  /// Starts a send or receive. `members`: the ranks of its process set.
  void post(std::shared_ptr<Operation> operation, std::span<const Rank> members);
  /// Handles a frame. Throws Error with a phrase about the frame if the peer may not send it.
  void on_frame(Rank from, const Point& message);
  /// Reads from shared memory. True if it read something. It calls `lose` with the error for a rank that wrote invalid
  /// data.
  bool receive(const std::function<void(Rank, const std::string&)>& lose);
  /// Ends messages in flight from a rank that has left, because its connection for tensors has closed.
  void on_data_end(Rank rank);
  /// Sends as far as there is room, and finishes sent operations. True if anything changed.
  bool step();
  /// True while an operation waits, so that shared memory must be polled.
  bool is_waiting() const noexcept { return !matching_.posted().empty() || !busy_.empty(); }
  TimePoint next_deadline() const noexcept { return next_deadline_; }
  /// Ends operations that have found no match in time. Throws Error(TIMEOUT) if bytes stop in the middle of a message.
  void check_time(TimePoint now);
  /// Records that the rank is alive, and when tensor bytes last moved on a connection with it.
  void note_life(Rank rank, TimePoint moved_at);
  /// Ends operations with a rank that has left gracefully.
  void depart(Rank rank);
  /// Ends the operations of a process set with this status and text.
  void close(std::int32_t process_set, std::int32_t status, const std::string& text);
  /// Drops all messages without ending their operations, because the engine has failed and ends them itself.
  void clear() noexcept;

 private:
  /// Bytes that each message adds to its size in the limit, so that empty messages count too.
  static constexpr std::uint64_t kMessageCost = 256;
  // Mark behind the bytes of a message between hosts. It is in the same stream, so it arrives in time.
  static constexpr std::byte kFiller{0};
  static constexpr std::byte kWhole{1};

  /// A received message, or its announcement.
  struct Message {
    DType dtype{};
    std::uint64_t bytes = 0;
    std::uint64_t number = 0;
    bool is_announced = false;
    Bytes payload;
    std::shared_ptr<Operation> own;  // the send, if this rank sends to itself
  };
  struct Receive {
    std::shared_ptr<Operation> operation;
    std::vector<Rank> senders;  // possible senders, of a receive from any rank
    std::uint64_t place = 0;    // number of the receive in the order of submission
  };
  struct Incoming {
    Receive receive;  // its operation is null if the message was withdrawn: filler arrives
    std::uint64_t number = 0;
    std::uint64_t bytes = 0;
    std::span<std::byte> left = {};  // inside a host: memory for the missing bytes
    DataLink::Ticket body = 0;       // between hosts: receive of the bytes
    DataLink::Ticket end = 0;        // between hosts: receive of the mark
    std::byte mark{};                // kFiller or kWhole
  };
  struct Outgoing {
    std::shared_ptr<Operation> operation;
    std::span<const std::byte> left = {};
    DataLink::Ticket ticket = 0;
  };
  struct Frame {
    Bytes head;
    std::shared_ptr<Operation>
        send;  // the send of a small message; its bytes follow `head` in the lane
  };
  /// Pending work with one other rank.
  struct Peer {
    std::optional<LaneWriter> writer;  // inside a host only
    std::optional<LaneReader> reader;
    std::deque<Frame> frames;  // frames that wait for room in the lane
    std::uint64_t next_number = 0;
    std::uint64_t eager_sent = 0;      // bytes of small messages sent to the peer
    std::uint64_t eager_taken = 0;     // bytes that the peer has acknowledged
    std::uint64_t eager_consumed = 0;  // bytes of the peer's small messages taken here
    std::uint64_t eager_told = 0;      // bytes acknowledged to the peer
    std::map<std::uint64_t, std::shared_ptr<Operation>> announced;
    std::map<std::uint64_t, std::uint64_t>
        withdrawn;                  // bytes of withdrawn messages, until the peer has answered
    std::deque<Outgoing> outgoing;  // messages that the peer has accepted, in its order
    std::deque<Incoming> incoming;  // messages accepted here, in the order of acceptance
    TimePoint sent_at{};            // time of the last bytes to the peer in shared memory
    TimePoint received_at{};
    bool has_left = false;
    bool is_busy = false;  // the peer is in busy_

    bool is_idle() const noexcept {
      return frames.empty() && announced.empty() && outgoing.empty() && incoming.empty();
    }
  };

  Peer& peer(Rank rank) { return peers_[static_cast<std::size_t>(index_of(rank))]; }
  Rank rank_of(const Peer& peer) const;
  void make_busy(Rank rank);
  DataLink& data_link(Rank rank) { return world_.data_link(rank, 0); }
  bool goes_at_once(const Peer& peer, const Operation& send) const noexcept;
  void send(std::shared_ptr<Operation> operation);
  void receive_into(std::shared_ptr<Operation> operation, std::span<const Rank> members);
  void arrive(const Address& address, Message message);
  void arrive_small(const Address& address, Message message,
                    const std::function<void(std::span<std::byte>)>& read);
  static bool fits(DType dtype, std::uint64_t bytes, const Operation& receive);
  void meet(Rank from, Message& message, Receive receive);
  void accept(Rank from, const Message& message, Receive receive);
  void put_in_line(Receive receive);
  void take_next(Rank from, Receive receive);
  void redirect(Rank from, Incoming& incoming, const Operation& receive);
  void fill(Rank to, std::uint64_t bytes);
  void on_accept(Rank from, std::uint64_t number);
  void on_withdraw(Rank from, std::uint64_t number);
  void drop(Rank from, const Message& message);
  void consume(Rank from, std::uint64_t bytes);
  bool receive_records(Rank from, Peer& peer);
  void receive_frame(Rank from, Peer& peer, const LaneRecord& record);
  void receive_small(Rank from, Peer& peer, const LaneRecord& record);
  void receive_chunk(Peer& peer, const LaneRecord& record);
  bool send_records(Peer& peer);
  bool finish_transfers(Rank rank, Peer& peer);
  void tell(Rank to, const Point& message, std::shared_ptr<Operation> send = nullptr);
  void watch(const Operation& operation);
  void end_transfers(Peer& left);
  void complete(Operation& receive, Rank from, std::uint64_t bytes);
  void end(Operation& operation, std::int32_t status, const std::string& text);
  /// Ends waiting receives and announced sends with the text `why(operation)`. Operations with an empty text continue.
  using Why = std::function<std::string(const Operation& operation, const Receive* receive)>;
  void end_unmatched(std::int32_t status, const Why& why);

  World& world_;
  Finish finish_;
  AskForLife ask_for_life_;
  std::vector<Peer> peers_;        // by rank
  std::vector<Rank> local_peers_;  // the other ranks of this rank's island
  std::vector<Rank> busy_;         // ranks with work for `step`
  Matching<Receive, Message> matching_;
  std::uint64_t receives_ = 0;                                   // receives submitted so far
  std::map<std::uint64_t, std::shared_ptr<Operation>> to_self_;  // sends to itself, by number
  std::set<std::int32_t> closed_;                                // process sets that have ended
  TimePoint next_deadline_ = kNever;
};

}  // namespace sparkhvd
