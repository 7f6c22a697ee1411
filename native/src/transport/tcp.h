// Options of TCP between hosts.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace sparkhvd {

/// For connections of the engine: bytes leave at once, and on an idle connection another host that is gone is
/// noticed after `host_loss_s`, if that is given. Nothing happens to
/// other sockets; errors are ignored, because the connection works without.
void tune_tcp(int fd, std::optional<double> host_loss_s);

/// What a connection's kernel knows of the peer's.
struct TcpState {
  /// Bytes, or a question for room, are on their way: the peer's kernel owes an answer.
  bool is_owed = false;
  /// Bytes wait for room at the peer: the kernel asks for some, more and more rarely.
  bool is_blocked = false;
  std::chrono::milliseconds since_answer{};
  /// Received so far, with those that answer nothing; always 0 on kernels that do not count (before 4.2).
  std::uint32_t segments = 0;
};
/// Nothing for other sockets.
std::optional<TcpState> tcp_state(int fd);

}  // namespace sparkhvd
