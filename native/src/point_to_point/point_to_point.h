// Messages from one rank to another. Unlike collectives they are not negotiated: they run in any order beside
// collectives, and no third rank handles the bytes.
//
// A small message is sent at once, with its bytes. The sender of a larger message announces the size. After the match
// with a receive the receiver accepts, and the bytes move from tensor to tensor, in the order of acceptance. Inside a
// host everything passes through lanes in shared memory. Else frames use the connection for control frames and bytes
// a connection for tensors, as a separate stream.
//
// **Threads.** The driver's.
//
// **Ownership.** A tensor is lent until its operation is finished. The receiver keeps unmatched small messages, up to
// kEagerInFlight bytes from each sender, but only the announcements of large messages.
//
// **Ends.** A message without a receive in time is withdrawn, and only its operation ends. Bytes that stop in the middle
// of a message fail the engine, as in a collective.
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
  /// The stream of its bytes on connections for tensors, and its number in CREDIT.
  static constexpr std::int32_t kStream = -1;
  /// Messages of up to this size are sent at once, inside a host if a record has room for them.
  static constexpr std::size_t kEagerBytes = 64 << 10;
  /// Largest number of these bytes that the receiver has not taken yet.
  static constexpr std::uint64_t kEagerInFlight = 512 << 10;

  using Finish = std::function<void(Operation&, std::int32_t status, std::string message)>;
  PointToPoint(World& world, Finish finish, AskForLife ask_for_life);

  /// Takes a send or receive. `members`: of its process set.
  void post(std::shared_ptr<Operation> operation, std::span<const Rank> members);
  /// Throws Error with a sentence fragment if the peer cannot have sent this.
  void on_frame(Rank from, const Point& message);
  /// Reads shared memory. True if there was anything. `lose`: reports a rank with invalid memory, and the error.
  bool receive(const std::function<void(Rank, const std::string&)>& lose);
  /// The connection for tensors has closed, after the goodbye: nothing more arrives.
  void on_data_end(Rank rank);
  /// Sends as far as there is room, and finishes sent operations. True if anything moved.
  bool step();
  /// True while anything waits, so that shared memory must be polled.
  bool is_waiting() const noexcept { return !matching_.posted().empty() || !busy_.empty(); }
  TimePoint next_deadline() const noexcept { return next_deadline_; }
  /// Ends operations without a match in time. Throws Error(TIMEOUT) if bytes have stopped in the middle.
  void check_time(TimePoint now);
  /// Records that the rank is alive, and when tensor bytes last moved on a connection with it.
  void note_life(Rank rank, TimePoint moved_at);
  /// A rank has left gracefully.
  void depart(Rank rank);
  /// A process set ends.
  void close(std::int32_t process_set, std::int32_t status, const std::string& text);
  /// Drops everything silently: the engine has failed, and ends the operations itself.
  void clear() noexcept;

 private:
  /// Overhead of a message in the limit, so that empty messages count, too.
  static constexpr std::uint64_t kMessageCost = 256;
  /// Behind the bytes of a message between hosts, in their stream, where it cannot be late.
  static constexpr std::byte kFiller{0};
  static constexpr std::byte kWhole{1};

  /// A received message, or its announcement.
  struct Message {
    DType dtype{};
    std::uint64_t bytes = 0;
    std::uint64_t number = 0;
    bool is_announced = false;
    Bytes payload;
    std::shared_ptr<Operation> own;  // of this rank to itself, announced
  };
  struct Receive {
    std::shared_ptr<Operation> operation;
    std::vector<Rank> senders;  // of a receive from any rank
    std::uint64_t place = 0;    // among receives, in the order in which they were submitted
  };
  struct Incoming {
    Receive receive;  // without its operation: the message was withdrawn, and filler follows
    std::uint64_t number = 0;
    std::uint64_t bytes = 0;
    std::span<std::byte> left = {};  // through shared memory
    DataLink::Ticket body = 0;       // between hosts
    DataLink::Ticket end = 0;
    std::byte mark{};  // behind the bytes: their kind
  };
  struct Outgoing {
    std::shared_ptr<Operation> operation;
    std::span<const std::byte> left = {};
    DataLink::Ticket ticket = 0;
  };
  struct Frame {
    Bytes head;
    std::shared_ptr<Operation>
        send;  // a small message, whose bytes follow: sent when they are in the lane
  };
  /// Pending work with one other rank.
  struct Peer {
    std::optional<LaneWriter> writer;  // inside a host
    std::optional<LaneReader> reader;
    std::deque<Frame> frames;  // for the lane
    std::uint64_t next_number = 0;
    std::uint64_t eager_sent = 0;  // bytes, and the bytes that the peer has taken
    std::uint64_t eager_taken = 0;
    std::uint64_t eager_consumed = 0;  // of the peer's, and the acknowledged bytes
    std::uint64_t eager_told = 0;
    std::map<std::uint64_t, std::shared_ptr<Operation>> announced;
    std::map<std::uint64_t, std::uint64_t>
        withdrawn;                  // bytes by number, until the peer has answered
    std::deque<Outgoing> outgoing;  // accepted by the peer, in its order
    std::deque<Incoming> incoming;  // accepted here, in this order
    TimePoint sent_at{};            // through shared memory, the last of any of them
    TimePoint received_at{};
    bool has_left = false;
    bool is_busy = false;  // it is in busy_

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
  /// Ends receives and announced sends by `why(operation)`, which is empty for operations that continue.
  using Why = std::function<std::string(const Operation& operation, const Receive* receive)>;
  void end_unmatched(std::int32_t status, const Why& why);

  World& world_;
  Finish finish_;
  AskForLife ask_for_life_;
  std::vector<Peer> peers_;        // by rank
  std::vector<Rank> local_peers_;  // those of this rank's island
  std::vector<Rank> busy_;         // ranks with work for `step`
  Matching<Receive, Message> matching_;
  std::uint64_t receives_ = 0;                                   // submitted so far
  std::map<std::uint64_t, std::shared_ptr<Operation>> to_self_;  // announced, by number
  std::set<std::int32_t> closed_;                                // process sets
  TimePoint next_deadline_ = kNever;
};

}  // namespace sparkhvd
