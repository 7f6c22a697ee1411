// The connection for the control frames of two ranks: always read, so that nothing waits behind tensor
// bytes. It shows the loss of a peer.
//
// **Ownership.** Frames are copied in. Descriptors that come with frames belong to the link until they
// are taken.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "message.h"
#include "transport/link.h"

namespace sparkhvd {

class ControlLink : public Link {
 public:
  /// Called with each frame; returns false to stop reading for now.
  using Handler = std::function<bool(FrameType type, std::span<const std::byte> body)>;

  using Link::Link;

  /// Queues a frame; `flush` writes it.
  void send(Bytes frame);
  /// Sends a frame in two parts. The socket accepts bytes directly from `payload`; the rest is queued.
  void send(Bytes head, std::span<const std::byte> payload);
  /// True if `send` has written anything since the last call.
  bool take_has_written() noexcept { return std::exchange(has_written_, false); }
  /// Queues a frame whose first byte carries descriptors (AF_UNIX only); they are copied.
  void send_with_fds(Bytes frame, std::span<const int> fds);
  /// Writes as much as the socket accepts. True if bytes moved.
  bool flush();
  bool wants_write() const noexcept { return !outgoing_.empty() && can_write(); }

  /// Reads available bytes, at most about `budget`. True if bytes moved.
  bool read(const Handler& handler, std::size_t budget);
  /// True if `read` has work although the socket may be empty.
  bool has_buffered() const noexcept { return resume_; }
  /// The next `count` received descriptors, in the order of their frames; fewer if the peer sent fewer. Call it
  /// from the handler of such a frame.
  std::vector<Fd> take_fds(std::size_t count);
  /// From now on descriptors are neither expected nor accepted.
  void refuse_fds() noexcept { accept_fds_ = false; }

 private:
  static constexpr std::size_t kBufferBytes = 16 << 10;  // holds several frames
  struct Outgoing {
    Bytes frame;
    std::size_t written = 0;
    std::vector<Fd> fds;  // go with the first byte
  };

  bool parse(const Handler& handler);

  std::deque<Outgoing> outgoing_;
  Bytes buffer_;
  std::size_t begin_ = 0;  // unparsed bytes of buffer_
  std::size_t end_ = 0;
  bool resume_ = false;
  bool accept_fds_ = true;
  bool has_written_ = false;
  std::deque<Fd> fds_;
};

}  // namespace sparkhvd
