#include "transport/tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace sparkhvd {
namespace {

// A round trip below this time belongs to a local network.
constexpr std::uint32_t kLocalRoundTrip_us = 1000;

/// Replaces BBR by Reno on a local network. There TCP repairs losses within a round trip, and the CPU time per byte is
/// more important. BBR takes more than twice as much of it as Reno (16 MiB each way over veth: 24 instead of 10 ms of
/// CPU on both ranks together), and every process may use Reno. On longer paths, and for algorithms other than BBR, the
/// system's choice stays.
void choose_congestion_control(int fd) {
  char name[16] = {};
  socklen_t size = sizeof(name) - 1;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return;
  if (!std::string_view(name).starts_with("bbr")) return;
  tcp_info info{};
  size = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  if (info.tcpi_rtt == 0 || info.tcpi_rtt > kLocalRoundTrip_us) return;
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/// The bytes of an address without its port; empty if it is not an IP address.
std::string_view host_of(const sockaddr_storage& address) {
  const auto bytes = [](const auto& host) {
    return std::string_view(reinterpret_cast<const char*>(&host), sizeof(host));
  };
  if (address.ss_family == AF_INET) {
    return bytes(reinterpret_cast<const sockaddr_in&>(address).sin_addr);
  }
  if (address.ss_family == AF_INET6) {
    return bytes(reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  }
  return {};
}

}  // namespace

void tune_tcp(int fd, std::optional<double> host_loss_s) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t size = sizeof(own);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return;
  size = sizeof(peer);
  if (host_of(own).empty() || ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
    return;
  }
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  choose_congestion_control(fd);
  // No keepalive inside a host: a host cannot lose itself, but simultaneous probes of thousands of idle connections
  // overflow the loopback device, and two lost probes would end a connection.
  if (!host_loss_s || host_of(own) == host_of(peer)) return;
  const int loss_s = std::max(3, static_cast<int>(*host_loss_s));
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, loss_s / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, loss_s / 3));
  set(IPPROTO_TCP, TCP_KEEPCNT, 2);
  // No TCP_USER_TIMEOUT: it ends connections to live processes that do not read. See LossWatch.
}

std::optional<TcpState> tcp_state(int fd) {
  // Linux's struct tcp_info. glibc declares only its first half, and older kernels fill in fewer bytes.
  std::array<std::byte, 232> info{};
  socklen_t size = info.size();
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info.data(), &size) != 0) return std::nullopt;
  const auto number_at = [&](std::size_t offset) {
    std::uint32_t value = 0;
    std::memcpy(&value, info.data() + offset, sizeof(value));
    return value;
  };
  const auto unanswered_probes = std::to_integer<unsigned>(info[3]);
  const auto unacked = number_at(24);
  const auto last_ack_recv_ms = number_at(56);
  const auto segs_in = number_at(140);
  const auto notsent_bytes = number_at(144);
  const auto snd_wnd = number_at(228);
  // If the peer has room but bytes are not sent, they have no route: the device is down, or the route is gone.
  const bool has_no_way = notsent_bytes > 0 && snd_wnd >= notsent_bytes;
  return TcpState{unacked > 0 || has_no_way || unanswered_probes > 0, notsent_bytes > 0,
                  std::chrono::milliseconds(last_ack_recv_ms), segs_in};
}

}  // namespace sparkhvd
