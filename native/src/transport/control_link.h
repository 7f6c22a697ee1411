// The connection for the control frames of two ranks. It has no tensor bytes and is always read, so a frame never waits
// behind tensors. Its end shows the loss of a peer.
//
// **Ownership.** `send` copies frames. Received descriptors belong to the link until `take_fds`.
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
  /// Function that the link calls with each frame. It returns false to stop reading for now.
  using Handler = std::function<bool(FrameType type, std::span<const std::byte> body)>;

  using Link::Link;

  /// Queues a frame; `flush` writes it.
  void send(Bytes frame);
  /// Sends a frame in two parts. The socket takes bytes directly from `payload`, and a copy of the rest is queued.
  void send(Bytes head, std::span<const std::byte> payload);
  /// True if `send` has written anything since the last call.
  bool take_has_written() noexcept { return std::exchange(has_written_, false); }
  /// Queues a frame with descriptors, which travel with its first byte (AF_UNIX only). It copies the descriptors.
  void send_with_fds(Bytes frame, std::span<const int> fds);
  /// Writes as much as the socket accepts. True if bytes moved.
  bool flush();
  bool wants_write() const noexcept { return !outgoing_.empty() && can_write(); }

  /// Reads available bytes, at most about `budget`. True if bytes moved.
  bool read(const Handler& handler, std::size_t budget);
  /// True if buffered bytes wait for `read`, although the socket may be empty.
  bool has_buffered() const noexcept { return resume_; }
  /// Takes the next `count` received descriptors, in the order of their frames; fewer if the peer sent fewer. Call it
  /// from the handler of a frame with descriptors.
  std::vector<Fd> take_fds(std::size_t count);
  /// Makes the link drop descriptors that arrive from now on.
  void refuse_fds() noexcept { accept_fds_ = false; }

 private:
  static constexpr std::size_t kBufferBytes = 16 << 10;  // holds several frames
  struct Outgoing {
    Bytes frame;
    std::size_t written = 0;
    std::vector<Fd> fds;  // sent with the first byte
  };

  bool parse(const Handler& handler);

  std::deque<Outgoing> outgoing_;
  Bytes buffer_;
  std::size_t begin_ = 0;  // the bytes of buffer_ from begin_ to end_ are not parsed yet
  std::size_t end_ = 0;
  bool resume_ = false;
  bool accept_fds_ = true;
  bool has_written_ = false;
  std::deque<Fd> fds_;
};

}  // namespace sparkhvd
