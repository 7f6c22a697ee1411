// Options of TCP between hosts.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace sparkhvd {

/// For connections of the engine: bytes are sent at once, and a lost host on an idle connection is detected after
/// `host_loss_s`, if given. Other sockets are not changed. Errors are ignored, because the connection works without
/// these options.
void tune_tcp(int fd, std::optional<double> host_loss_s);

/// The kernel's information about a connection's peer.
struct TcpState {
  /// Bytes, or a window probe, are in flight: the peer's kernel owes an answer.
  bool is_owed = false;
  /// Bytes wait for room at the peer: the kernel probes, more and more rarely.
  bool is_blocked = false;
  std::chrono::milliseconds since_answer{};
  /// Received so far, including segments without an answer; always 0 on kernels before 4.2.
  std::uint32_t segments = 0;
};
/// Nothing for other sockets.
std::optional<TcpState> tcp_state(int fd);

}  // namespace sparkhvd
