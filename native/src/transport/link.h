// A connection to one peer: its socket, and how it ends. Control frames and tensor bytes have
// connections of their own: see control_link.h and data_link.h.
//
// **Threads.** A Link is used by one thread at a time, the one that drives the engine.
//
// **Shutdown.** `close_write` says "nothing more from us" and lets the peer read all that was sent;
// destroying the Link closes the socket.
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
    kEnded,   // the peer will send nothing more; everything before that has been handed over
    kBroken,  // the connection is reset or the peer sent nonsense
  };

  Link() = default;
  Link(Rank peer, Fd socket);

  Rank peer() const noexcept { return peer_; }
  int fd() const noexcept { return socket_.get(); }
  bool is_open() const noexcept { return socket_.valid(); }
  State state() const noexcept { return state_; }
  /// Between hosts.
  bool is_tcp() const noexcept { return is_tcp_; }
  /// The peer's process has ended, or has closed the connection: its kernel says so.
  bool is_ended_by_peer() const noexcept;
  /// Why it is not open any more, as a clause.
  std::string trouble() const;
  /// From now on the link adds itself to this list when it has something to write, once until `unlist`.
  void list_output(std::vector<Link*>& list) noexcept { list_ = &list; }
  void unlist() noexcept { is_listed_ = false; }
  /// From now on bytes are counted there.
  void count(Traffic& traffic) noexcept { traffic_ = &traffic; }
  /// Neither is used any more: the engine may end before the link.
  void leave_engine() noexcept {
    list_ = nullptr;
    traffic_ = nullptr;
  }

  /// The peer's host has every byte that was written: a close, even with bytes unread here, takes
  /// nothing from the peer.
  bool is_delivered() const noexcept;
  void close_write() noexcept;
  /// Closes the descriptor, also in a forked child, without a word to the peer.
  void close() noexcept { socket_.reset(); }

 protected:
  static constexpr std::size_t kMaxFds = 4;
  /// Of one call that writes.
  static constexpr std::size_t kMaxVectors = 16;

  /// Bytes that the socket took; nothing if it takes none now. An error only stops the writing: the
  /// peer's last words may still be unread, and they tell the cause.
  std::optional<std::size_t> write_some(std::span<iovec> vectors, std::span<const Fd> fds = {});
  /// Bytes read; nothing if there are none now, or if the connection has ended. Descriptors that come
  /// with them are handed to `take`, where it is not null.
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
  int broken_by_ = -1;   // errno that broke it; -1: nonsense
};

}  // namespace sparkhvd
