// Options and state of TCP connections between hosts.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace sparkhvd {

/// Sets the options of a TCP connection: the kernel sends bytes at once, and its keepalive detects a lost host on an
/// idle connection after `host_loss_s`, if given. Other kinds of sockets stay unchanged. It ignores errors, because the
/// connection works without these options.
void tune_tcp(int fd, std::optional<double> host_loss_s);

/// What the local kernel knows about the peer of a connection.
struct TcpState {
  /// True if bytes or a window probe are in flight, so the peer's kernel must answer.
  bool is_owed = false;
  /// True if bytes wait because the peer does not read. The kernel then sends window probes, more and more rarely.
  bool is_blocked = false;
  std::chrono::milliseconds since_answer{};
  /// Number of received segments, including segments without an acknowledgement; always 0 on kernels before 4.2.
  std::uint32_t segments = 0;
};
/// The state of a TCP connection; std::nullopt for other sockets.
std::optional<TcpState> tcp_state(int fd);

}  // namespace sparkhvd
