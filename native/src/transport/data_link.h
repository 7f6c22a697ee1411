// A connection for the tensor bytes of two ranks: an ordered stream of bytes per process set; streams may
// overtake each other.
//
// **Credit.** A stream's receiver grants the sender the bytes of posted receives, and some bytes beyond. So a
// connection is always read, early bytes need little memory, and a large transfer starts when the receive is
// posted.
//
// **Ownership.** Bytes are sent from, and received into, memory that the caller lends until `sent` or
// `received` is true, or `cancel_lent` is called.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>

#include "clock.h"
#include "message.h"
#include "transport/link.h"

namespace sparkhvd {

class DataLink : public Link {
 public:
  /// A position in the order of lent sends (or receives) of this link.
  using Ticket = std::uint64_t;
  /// Bytes by which a stream's sender may run ahead of its receiver, by the number of ranks. Each half of them costs a
  /// CREDIT frame, and each peer may send this many.
  static constexpr std::uint64_t unasked_among(std::size_t ranks) noexcept {
    return std::clamp<std::uint64_t>((64 << 20) / ranks, 256 << 10, 512 << 10);
  }

  /// `unasked`: see `unasked_among`; equal on both sides.
  DataLink() = default;
  DataLink(Rank peer, Fd socket, std::uint64_t unasked)
      : Link(peer, std::move(socket)), unasked_(unasked) {}

  /// Queues bytes of `stream`. `payload` is lent until `sent(ticket)`.
  Ticket send_data(std::int32_t stream, std::span<const std::byte> payload);
  bool sent(Ticket ticket) const noexcept { return sends_.is_done(ticket); }
  /// The peer accepts the first `bytes` of `stream`.
  void grant(std::int32_t stream, std::uint64_t bytes);

  /// Receives the next bytes of `stream` into `target`, which is lent until `received(ticket)`.
  Ticket receive_data(std::int32_t stream, std::span<std::byte> target);
  bool received(Ticket ticket) const noexcept { return receives_.is_done(ticket); }
  /// Drops the remaining bytes of this receive; its memory is no longer lent.
  void discard(Ticket ticket);
  /// Missing bytes of this receive.
  std::size_t missing(Ticket ticket) noexcept;
  /// Moves this receive to `target`, which has room for it; the former memory is no longer lent.
  void redirect(Ticket ticket, std::span<std::byte> target);
  /// The new credit of the peer after new receives: total bytes of `stream` that it may send; nothing if its
  /// credit lasts for a while.
  std::optional<std::uint64_t> take_credit(std::int32_t stream);

  /// Writes as much as the socket accepts. True if bytes moved.
  bool flush();
  bool wants_write() const noexcept { return !frames_.empty() && can_write(); }
  /// Reads available bytes, at most about `budget`. True if bytes moved.
  bool read(std::size_t budget);

  /// Time of the last written, or read, bytes of any stream, because later bytes wait for them.
  TimePoint written_at() const noexcept { return written_at_; }
  TimePoint read_at() const noexcept { return read_at_; }

  /// Drops all lent memory; nothing is sent or received any more.
  void cancel_lent();
  /// The same for one stream. Frames stay whole, and its later bytes are dropped.
  void cancel_lent(std::int32_t stream);
  /// Forgets a stream whose last byte has been sent and received.
  void forget(std::int32_t stream);

 private:
  // Holds several small frames; large frames bypass it.
  static constexpr std::size_t kBufferBytes = 64 << 10;
  // A peer that names more process sets than this is invalid.
  static constexpr std::size_t kMaxStreams = 1 << 16;
  struct Send {
    std::int32_t stream = 0;
    std::span<const std::byte> left;  // not in a frame yet
    bool done = false;
  };
  struct Receive {
    std::int32_t stream = 0;
    std::span<std::byte> left;
    bool done = false;
    bool is_discarded = false;
  };
  /// Transfers in the order of their tickets, without finished ones at the head.
  template <class Transfer>
  struct Queue {
    std::deque<Transfer> transfers;
    Ticket first = 1;  // ticket of the first transfer

    Ticket push(Transfer transfer) {
      transfers.push_back(transfer);
      const Ticket ticket = first + transfers.size() - 1;
      pop_done();
      return ticket;
    }
    Transfer& at(Ticket ticket) { return transfers[ticket - first]; }
    bool is_done(Ticket ticket) const noexcept {
      return ticket < first || transfers[ticket - first].done;
    }
    void finish(Ticket ticket) {
      at(ticket).done = true;
      pop_done();
    }
    void pop_done() {
      for (; !transfers.empty() && transfers.front().done; ++first) transfers.pop_front();
    }
    void finish_all() {
      first += transfers.size();
      transfers.clear();
    }
  };
  struct Frame {
    std::array<std::byte, kDataHeaderBytes> header{};
    std::span<const std::byte> payload;
    std::size_t written = 0;
    std::int32_t stream = 0;
    Ticket completes = 0;  // the send whose last bytes it has; 0: none
    Bytes owned = {};      // the payload of a cancelled send
    std::size_t size() const noexcept { return header.size() + payload.size(); }
  };
  struct Stream {
    bool is_cancelled = false;
    std::deque<Ticket> sends;  // with bytes without a frame
    std::uint64_t framed = 0;
    std::uint64_t granted = 0;    // by the peer; at least unasked_
    std::deque<Ticket> receives;  // not full
    std::uint64_t posted = 0;
    std::uint64_t offered = 0;  // to the peer, at least unasked_
    std::uint64_t arrived = 0;
    Bytes early;  // bytes that arrived before their receive, from `taken`
    std::size_t taken = 0;
  };

  void make_frames(std::int32_t stream, Stream& state);
  void count_written(std::size_t bytes);
  void parse();
  void begin_frame(std::span<const std::byte> header);
  void deliver(std::span<const std::byte> bytes);
  /// `bytes` of the current frame are in the memory of its stream's first receive.
  void advance(Stream& stream, std::size_t bytes);
  void take_early(Stream& stream);
  static void copy(const Receive& receive, std::span<const std::byte> bytes);

  std::uint64_t unasked_ = 0;
  std::map<std::int32_t, Stream> streams_;
  Queue<Send> sends_;
  std::deque<Frame> frames_;
  Queue<Receive> receives_;
  Bytes buffer_;
  std::size_t begin_ = 0;  // unparsed bytes of buffer_
  std::size_t end_ = 0;
  Stream* current_ = nullptr;  // of the current frame
  TimePoint written_at_{};
  TimePoint read_at_{};
  std::size_t data_left_ = 0;  // its bytes that have not been delivered
  bool is_cancelled_ = false;
};

}  // namespace sparkhvd
