// A connection to one peer: its socket and the detection of its end. Control frames and tensor bytes have separate
// connections: see control_link.h and data_link.h.
//
// **Threads.** Only the driver's thread uses it.
//
// **Shutdown.** `close_write` ends this direction, and the peer can still read all sent bytes. Destroying the Link
// closes the socket.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "counter.h"
#include "transport/fd.h"
#include "types.h"

namespace sparkhvd {

class Link {
 public:
  enum class State {
    kOpen,
    kEnded,   // the peer will send nothing more, and all its bytes have been read
    kBroken,  // the connection is reset or the peer sent invalid bytes
  };

  Link() = default;
  Link(Rank peer, Fd socket);

  Rank peer() const noexcept { return peer_; }
  int fd() const noexcept { return socket_.get(); }
  bool is_open() const noexcept { return socket_.valid(); }
  State state() const noexcept { return state_; }
  /// True for a connection between hosts.
  bool is_tcp() const noexcept { return is_tcp_; }
  /// True if the peer's kernel has reported that its process has ended or has closed the connection.
  bool is_ended_by_peer() const noexcept;
  /// Why the connection is no longer open, as a clause for messages.
  std::string trouble() const;
  /// Makes the link add itself to `list` when it has bytes to write, at most once until `unlist`.
  void list_output(std::vector<Link*>& list) noexcept { list_ = &list; }
  void unlist() noexcept { is_listed_ = false; }
  /// Makes the link count its bytes in `traffic`.
  void count(Traffic& traffic) noexcept { traffic_ = &traffic; }
  /// Forgets the list and the counters, because the engine may end before the link.
  void leave_engine() noexcept {
    list_ = nullptr;
    traffic_ = nullptr;
  }

  /// True if the peer's host has every written byte. Closing the connection then loses no bytes, even if this rank has
  /// unread bytes.
  bool is_delivered() const noexcept;
  void close_write() noexcept;
  /// Closes the descriptor. In a forked child the peer does not notice it.
  void close() noexcept { socket_.reset(); }

 protected:
  static constexpr std::size_t kMaxFds = 4;
  /// Largest number of buffers in one call that writes.
  static constexpr std::size_t kMaxVectors = 16;

  /// Writes, and returns the number of bytes that the socket accepted, if any. After an error the link can still be
  /// read, because the peer's unread last frames may contain the cause.
  std::optional<std::size_t> write_some(std::span<iovec> vectors, std::span<const Fd> fds = {});
  /// Reads, and returns the number of bytes; std::nullopt if there are no bytes now, or if the connection has ended. It
  /// passes received descriptors to `take`, unless this is null.
  std::optional<std::size_t> read_some(std::span<iovec> vectors,
                                       void (*take)(Link&, int) = nullptr);
  void has_output() {
    if (list_ != nullptr && !std::exchange(is_listed_, true)) list_->push_back(this);
  }
  bool can_write() const noexcept { return write_errno_ == 0 && socket_.valid(); }
  void fail(std::string trouble, int code = -1);

 private:
  Rank peer_{};
  Fd socket_;
  bool is_tcp_ = false;
  State state_ = State::kOpen;
  Traffic* traffic_ = nullptr;
  std::vector<Link*>* list_ = nullptr;
  bool is_listed_ = false;
  std::string trouble_;
  int write_errno_ = 0;  // errno of the first write that failed
  int broken_by_ = -1;   // errno that broke the connection; -1: invalid bytes
};

}  // namespace sparkhvd
