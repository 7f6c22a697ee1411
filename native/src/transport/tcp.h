// Options of TCP between hosts.
#pragma once

#include <chrono>
#include <optional>

namespace sparkhvd {

/// For connections of the engine: bytes leave at once, and on an idle connection another host that is gone is
/// noticed after `host_loss_s`, if that is given. Nothing happens to
/// other sockets; errors are ignored, because the connection works without.
void tune_tcp(int fd, std::optional<double> host_loss_s);

/// Bytes on their way, for which the peer's kernel owes an answer.
struct TcpSilence {
  bool is_owed = false;
  std::chrono::milliseconds since_answer{};
};
/// Nothing for other sockets.
std::optional<TcpSilence> tcp_silence(int fd);

}  // namespace sparkhvd
