// Messages from one rank to another. Unlike collectives nobody else agrees on them: they run in any order beside
// those, and no third rank touches the bytes.
//
// A small message goes at once, with its bytes. Of a larger one the sender announces the size; when it meets a
// receive, the receiver accepts, and the bytes go from tensor to tensor, in the order of acceptance. Inside a host
// all of this passes through lanes in shared memory; else frames go on the connection for control frames and bytes
// on one for tensors, as a stream of their own.
//
// **Threads.** The driver's.
//
// **Ownership.** A tensor is lent until its operation is finished. Small messages that nobody has asked for yet are
// kept by their receiver, up to kEagerInFlight bytes from each sender; of large ones only the announcement is.
//
// **Ends.** A message that meets no receive in time is withdrawn, and only its operation ends. Bytes that have begun
// to move and stop in the middle fail the engine, as in a collective.
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
  /// The stream of its bytes on connections for tensors, and what CREDIT calls it.
  static constexpr std::int32_t kStream = -1;
  /// Messages of up to so many bytes go at once, inside a host if a record has room for them.
  static constexpr std::size_t kEagerBytes = 64 << 10;
  /// Of these, what the receiver has not taken yet.
  static constexpr std::uint64_t kEagerInFlight = 512 << 10;

  using Finish = std::function<void(Operation&, std::int32_t status, std::string message)>;
  PointToPoint(World& world, Finish finish, AskForLife ask_for_life);

  /// Takes a send or receive. `members`: of its process set.
  void post(std::shared_ptr<Operation> operation, std::span<const Rank> members);
  /// Throws Error with a sentence fragment if the peer cannot have sent this.
  void on_frame(Rank from, const Point& message);
  /// Takes what has come through shared memory. True if anything has. `lose`: whose memory has nonsense, and which.
  bool receive(const std::function<void(Rank, const std::string&)>& lose);
  /// The connection for tensors has ended, after the goodbye: nothing more comes.
  void on_data_end(Rank rank);
  /// Sends what there is room for, and finishes what has been sent. True if anything moved.
  bool step();
  /// True while anything waits: then shared memory is worth a look.
  bool is_waiting() const noexcept { return !matching_.posted().empty() || !busy_.empty(); }
  TimePoint next_deadline() const noexcept { return next_deadline_; }
  /// Ends what has met nothing in time. Throws Error(TIMEOUT) if bytes have stopped in the middle.
  void check_time(TimePoint now);
  /// The rank lives, and moved tensor bytes on a connection last then.
  void note_life(Rank rank, TimePoint moved_at);
  /// A rank has left in order.
  void depart(Rank rank);
  /// A process set ends.
  void close(std::int32_t process_set, std::int32_t status, const std::string& text);
  /// Forgets everything without a word: the engine has failed, and ends the operations itself.
  void clear() noexcept;

 private:
  /// A message counts for so many bytes more than it has, so that empty ones are no way around the limit.
  static constexpr std::uint64_t kMessageCost = 256;
  /// Behind the bytes of a message between hosts, in their stream: only there it cannot come too late.
  static constexpr std::byte kFiller{0};
  static constexpr std::byte kWhole{1};

  /// A message that has come, or its announcement.
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
    std::vector<Rank> senders;  // of one from any rank
    std::uint64_t place = 0;    // among receives, in the order in which they were submitted
  };
  struct Incoming {
    Receive receive;  // without its operation: the message was withdrawn, and filler comes
    std::uint64_t number = 0;
    std::uint64_t bytes = 0;
    std::span<std::byte> left = {};  // through shared memory
    DataLink::Ticket body = 0;       // between hosts
    DataLink::Ticket end = 0;
    std::byte mark{};  // behind the bytes: what they are
  };
  struct Outgoing {
    std::shared_ptr<Operation> operation;
    std::span<const std::byte> left = {};
    DataLink::Ticket ticket = 0;
  };
  struct Frame {
    Bytes head;
    std::shared_ptr<Operation>
        send;  // a small message, whose bytes follow: sent once they are in the lane
  };
  /// All that is under way with one other rank.
  struct Peer {
    std::optional<LaneWriter> writer;  // inside a host
    std::optional<LaneReader> reader;
    std::deque<Frame> frames;  // for the lane
    std::uint64_t next_number = 0;
    std::uint64_t eager_sent = 0;  // bytes, and what the peer has taken of them
    std::uint64_t eager_taken = 0;
    std::uint64_t eager_consumed = 0;  // of the peer's, and what it has been told
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
  /// Ends receives and announced sends by `why(operation)`, which is empty for those that go on.
  using Why = std::function<std::string(const Operation& operation, const Receive* receive)>;
  void end_unmatched(std::int32_t status, const Why& why);

  World& world_;
  Finish finish_;
  AskForLife ask_for_life_;
  std::vector<Peer> peers_;        // by rank
  std::vector<Rank> local_peers_;  // those of this rank's island
  std::vector<Rank> busy_;         // those of whom `step` has something to do
  Matching<Receive, Message> matching_;
  std::uint64_t receives_ = 0;                                   // submitted so far
  std::map<std::uint64_t, std::shared_ptr<Operation>> to_self_;  // announced, by number
  std::set<std::int32_t> closed_;                                // process sets
  TimePoint next_deadline_ = kNever;
};

}  // namespace sparkhvd
