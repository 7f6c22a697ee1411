// A connection for the tensor bytes of two ranks. Each process set has an ordered stream of bytes on it; streams may
// overtake each other.
//
// **Credit.** A stream's receiver permits its sender to send the bytes of all posted receives, and a limited number of
// bytes beyond them (`unasked`). So a connection can always be read, early bytes need little memory, and a large
// transfer starts when its receive is posted.
//
// **Ownership.** The caller lends the memory that bytes are sent from or received into. The loan ends when `sent` or
// `received` is true, or with `cancel_lent`.
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
  /// Number of a send (or a receive) in the order of this link.
  using Ticket = std::uint64_t;
  /// Bytes that a stream's sender may send before their receives are posted, by the number of ranks. A larger number
  /// needs more memory per peer; a smaller number needs more CREDIT frames, each for half of these bytes.
  static constexpr std::uint64_t unasked_among(std::size_t ranks) noexcept {
    return std::clamp<std::uint64_t>((64 << 20) / ranks, 256 << 10, 512 << 10);
  }

  DataLink() = default;
  /// `unasked`: see `unasked_among`; equal on both ranks.
  DataLink(Rank peer, Fd socket, std::uint64_t unasked)
      : Link(peer, std::move(socket)), unasked_(unasked) {}

  /// Queues bytes of `stream`. `payload` is lent until `sent(ticket)`.
  Ticket send_data(std::int32_t stream, std::span<const std::byte> payload);
  bool sent(Ticket ticket) const noexcept { return sends_.is_done(ticket); }
  /// Records the peer's credit: it accepts the first `bytes` of `stream`.
  void grant(std::int32_t stream, std::uint64_t bytes);

  /// Receives the next bytes of `stream` into `target`, which is lent until `received(ticket)`.
  Ticket receive_data(std::int32_t stream, std::span<std::byte> target);
  bool received(Ticket ticket) const noexcept { return receives_.is_done(ticket); }
  /// Drops the remaining bytes of this receive; its memory is no longer lent.
  void discard(Ticket ticket);
  /// Number of bytes of this receive that have not arrived.
  std::size_t missing(Ticket ticket) noexcept;
  /// Makes the remaining bytes of this receive arrive in `target`. The former memory is no longer lent.
  void redirect(Ticket ticket, std::span<std::byte> target);
  /// New credit for the peer after new receives: the total bytes of `stream` that it may send. std::nullopt if the peer
  /// has enough credit for now.
  std::optional<std::uint64_t> take_credit(std::int32_t stream);

  /// Writes as much as the socket accepts. True if bytes moved.
  bool flush();
  bool wants_write() const noexcept { return !frames_.empty() && can_write(); }
  /// Reads available bytes, at most about `budget`. True if bytes moved.
  bool read(std::size_t budget);

  /// Time of the last written (or read) bytes. All streams count, because their bytes wait for each other.
  TimePoint written_at() const noexcept { return written_at_; }
  TimePoint read_at() const noexcept { return read_at_; }

  /// Ends all loans of memory: nothing is sent from it or received into it any more.
  void cancel_lent();
  /// Ends the loans of one stream. A begun frame is still completed, and later received bytes are dropped.
  void cancel_lent(std::int32_t stream);
  /// Forgets a stream whose last byte has been sent and received.
  void forget(std::int32_t stream);

 private:
  // The buffer holds several small frames. Bytes of large frames are read directly into tensors.
  static constexpr std::size_t kBufferBytes = 64 << 10;
  // Largest number of process sets; a peer that names more of them is invalid.
  static constexpr std::size_t kMaxStreams = 1 << 16;
  struct Send {
    std::int32_t stream = 0;
    std::span<const std::byte> left;  // the bytes that are not in a frame yet
    bool done = false;
  };
  struct Receive {
    std::int32_t stream = 0;
    std::span<std::byte> left;
    bool done = false;
    bool is_discarded = false;
  };
  /// Transfers in the order of their tickets. Finished transfers at the head are removed.
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
    Ticket completes = 0;  // ticket of the send that ends with this frame; 0: no send ends
    Bytes owned = {};      // a copy of the payload, after its send was cancelled
    std::size_t size() const noexcept { return header.size() + payload.size(); }
  };
  struct Stream {
    bool is_cancelled = false;
    std::deque<Ticket> sends;  // sends with bytes that are not in a frame yet
    std::uint64_t framed = 0;
    std::uint64_t granted = 0;    // total bytes that the peer accepts, if more than unasked_
    std::deque<Ticket> receives;  // receives that are not full
    std::uint64_t posted = 0;
    std::uint64_t offered = 0;  // total bytes that the peer may send, if more than unasked_
    std::uint64_t arrived = 0;
    Bytes early;  // bytes that arrived before their receive; those before `taken` are used
    std::size_t taken = 0;
  };

  void make_frames(std::int32_t stream, Stream& state);
  void count_written(std::size_t bytes);
  void parse();
  void begin_frame(std::span<const std::byte> header);
  void deliver(std::span<const std::byte> bytes);
  /// Counts `bytes` of the current frame that are now in the memory of its stream's first receive.
  void advance(Stream& stream, std::size_t bytes);
  void take_early(Stream& stream);
  static void copy(const Receive& receive, std::span<const std::byte> bytes);

  std::uint64_t unasked_ = 0;
  std::map<std::int32_t, Stream> streams_;
  Queue<Send> sends_;
  std::deque<Frame> frames_;
  Queue<Receive> receives_;
  Bytes buffer_;
  std::size_t begin_ = 0;  // the bytes of buffer_ from begin_ to end_ are not parsed yet
  std::size_t end_ = 0;
  Stream* current_ = nullptr;  // stream of the current frame
  TimePoint written_at_{};
  TimePoint read_at_{};
  std::size_t data_left_ = 0;  // bytes of the current frame that have not arrived
  bool is_cancelled_ = false;
};

}  // namespace sparkhvd
