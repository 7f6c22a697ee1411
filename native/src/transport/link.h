// One connection to one peer: framed, non-blocking, in order.
//
// **Threads.** A Link is used by one thread at a time, the one that drives the engine.
//
// **Ownership.** It owns its socket. Control frames are copied in; tensor bytes are sent from, and
// received into, memory that the caller lends until `sent` or `received` says it is done, or
// `cancel_lent` is called.
//
// **Shutdown.** `close_write` says "nothing more from us" and lets the peer read all that was sent;
// destroying the Link closes the socket.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "counter.h"
#include "message.h"
#include "transport/fd.h"
#include "types.h"

namespace sparkhvd {

class Link {
 public:
  /// A place in the order of lent sends (or receives) of this link.
  using Ticket = std::uint64_t;
  /// Called with each control frame; returns false to stop reading for now.
  using Handler = std::function<bool(FrameType type, std::span<const std::byte> body)>;

  enum class State {
    kOpen,
    kEnded,   // the peer will send nothing more; everything before that has been handed over
    kBroken,  // the connection is reset or the peer sent nonsense: see `trouble`
  };

  Link() = default;
  Link(Rank peer, Fd socket) : peer_(peer), socket_(std::move(socket)) {}

  Rank peer() const noexcept { return peer_; }
  int fd() const noexcept { return socket_.get(); }
  bool is_open() const noexcept { return socket_.valid(); }
  State state() const noexcept { return state_; }
  const std::string& trouble() const noexcept { return trouble_; }

  /// Queues a control frame; `flush` writes it.
  void send(Bytes frame);
  /// Queues a control frame whose first byte carries descriptors (AF_UNIX only); they are copied.
  void send_with_fds(Bytes frame, std::span<const int> fds);
  /// Queues tensor bytes. `payload` is lent until `sent(ticket)`.
  Ticket send_data(std::int32_t stream, std::span<const std::byte> payload);
  bool sent(Ticket ticket) const noexcept { return sent_ >= ticket; }
  Ticket last_send() const noexcept { return queued_; }

  /// Receives the next bytes of `stream` into `target`, which is lent until `received(ticket)`.
  Ticket receive_data(std::int32_t stream, std::span<std::byte> target);
  bool received(Ticket ticket) const noexcept {
    // Streams overtake each other.
    return received_ >= ticket || posted_[ticket - received_ - 1].done;
  }
  Ticket last_receive() const noexcept { return posted_count_; }

  /// Writes what the socket takes. True if bytes moved.
  bool flush();
  bool wants_write() const noexcept { return !outgoing_.empty() && !write_broken_; }
  /// Reads what is there, at most about `budget` bytes. True if bytes moved.
  bool read(const Handler& handler, std::size_t budget);
  /// False while the next bytes are a tensor's that has not been asked for yet.
  bool wants_read() const noexcept { return state_ == State::kOpen && !is_paused_; }
  /// True if `read` has something to do although the socket may have nothing new.
  bool has_buffered() const noexcept { return resume_; }

  /// The next `count` descriptors that came, in the order of the frames that carried them; fewer if
  /// the peer sent fewer. Call it from the handler of such a frame.
  std::vector<Fd> take_fds(std::size_t count);
  /// From now on bytes are counted there.
  void count(Traffic& traffic) noexcept { traffic_ = &traffic; }
  /// From now on descriptors are neither expected nor accepted.
  void refuse_fds() noexcept { accept_fds_ = false; }

  /// From now on tensor bytes that have not been asked for yet are kept, up to a limit, instead of
  /// being left in the socket. With one stream, those who sent too early wait. With several, what
  /// comes behind may be what the receiver needs before it can ask, and both would wait for ever.
  void keep_early_data() noexcept;

  /// Forgets all lent memory and drops tensor bytes that still come; frames stay whole.
  void cancel_lent();
  /// The same for one stream, for good.
  void cancel_lent(std::int32_t stream);
  void close_write() noexcept;
  /// Closes the descriptor, also in a forked child, without a word to the peer.
  void close() noexcept { socket_.reset(); }

 private:
  struct Outgoing {
    Bytes owned;
    std::span<const std::byte> lent;  // after `owned`
    std::size_t written = 0;
    bool completes = false;  // counts as one lent send when written
    std::int32_t stream = 0;
    std::vector<Fd> fds;  // go with the first byte
    std::size_t size() const noexcept { return owned.size() + lent.size(); }
  };
  struct Posted {
    std::int32_t stream = 0;
    std::span<std::byte> target;
    std::size_t filled = 0;
    bool done = false;
  };

  /// Bytes of a stream that came before they were asked for.
  struct Early {
    std::int32_t stream = 0;
    Bytes bytes;
    std::size_t taken = 0;
  };

  bool parse(const Handler& handler);
  bool deliver();
  bool is_discarded() const;
  void go_on() noexcept;
  Posted* find_posted();
  void complete_posted();
  void keep_early(std::span<const std::byte> bytes);
  void take_early(Posted& posted);
  std::ptrdiff_t receive_some(std::span<std::byte> target);
  std::ptrdiff_t send_some(std::span<iovec> vectors, std::span<const Fd> fds);
  void fail(std::string trouble);

  Rank peer_{};
  Fd socket_;
  State state_ = State::kOpen;
  Traffic* traffic_ = nullptr;
  std::string trouble_;
  bool write_broken_ = false;
  bool accept_fds_ = true;
  std::deque<Fd> fds_;

  std::deque<Outgoing> outgoing_;
  Ticket queued_ = 0;
  Ticket sent_ = 0;

  Bytes buffer_;
  std::size_t begin_ = 0;  // unparsed bytes of buffer_
  std::size_t end_ = 0;
  std::size_t data_left_ = 0;  // bytes of the current data frame not yet delivered
  std::int32_t data_stream_ = 0;
  bool discard_data_ = false;
  std::vector<std::int32_t> discarded_;  // streams
  bool keeps_early_ = false;
  std::deque<Early> early_;  // never of a stream that has a posted receive which is not full
  std::size_t early_bytes_ = 0;
  bool is_paused_ = false;
  bool resume_ = false;
  std::deque<Posted> posted_;
  Ticket posted_count_ = 0;
  Ticket received_ = 0;  // all up to here; the next is the first of posted_
};

}  // namespace sparkhvd
