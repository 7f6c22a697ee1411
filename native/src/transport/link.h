// A connection to one peer: its socket, and its end. Control frames and tensor bytes have separate
// connections: see control_link.h and data_link.h.
//
// **Threads.** The driver's.
//
// **Shutdown.** `close_write` ends this direction and lets the peer read all sent bytes; destroying the Link
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
    kEnded,   // the peer will send nothing more; all earlier bytes are delivered
    kBroken,  // the connection is reset or the peer sent invalid bytes
  };

  Link() = default;
  Link(Rank peer, Fd socket);

  Rank peer() const noexcept { return peer_; }
  int fd() const noexcept { return socket_.get(); }
  bool is_open() const noexcept { return socket_.valid(); }
  State state() const noexcept { return state_; }
  /// Between hosts.
  bool is_tcp() const noexcept { return is_tcp_; }
  /// The peer's process has ended, or has closed the connection, according to its kernel.
  bool is_ended_by_peer() const noexcept;
  /// Why it is no longer open, as a clause.
  std::string trouble() const;
  /// From now on the link adds itself to this list when it has bytes to write, once until `unlist`.
  void list_output(std::vector<Link*>& list) noexcept { list_ = &list; }
  void unlist() noexcept { is_listed_ = false; }
  /// From now on bytes are counted there.
  void count(Traffic& traffic) noexcept { traffic_ = &traffic; }
  /// Drops both, because the engine may end before the link.
  void leave_engine() noexcept {
    list_ = nullptr;
    traffic_ = nullptr;
  }

  /// The peer's host has every byte that was written: a close, even with bytes unread here, takes
  /// nothing from the peer.
  bool is_delivered() const noexcept;
  void close_write() noexcept;
  /// Closes the descriptor, also in a forked child, without notifying the peer.
  void close() noexcept { socket_.reset(); }

 protected:
  static constexpr std::size_t kMaxFds = 4;
  /// Of one call that writes.
  static constexpr std::size_t kMaxVectors = 16;

  /// Bytes that the socket accepted, if any. An error only stops writing, because the peer's unread last frames
  /// may contain the cause.
  std::optional<std::size_t> write_some(std::span<iovec> vectors, std::span<const Fd> fds = {});
  /// Bytes read; nothing if there are no bytes now, or if the connection has ended. Their descriptors are passed
  /// to `take`, if it is not null.
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
  int write_errno_ = 0;  // of the first write that failed
  int broken_by_ = -1;   // errno that broke it; -1: invalid bytes
};

}  // namespace sparkhvd
