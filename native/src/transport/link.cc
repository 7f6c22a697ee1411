#include "transport/link.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace sparkhvd {
namespace {

bool is_internet(int fd) noexcept {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         (address.ss_family == AF_INET || address.ss_family == AF_INET6);
}

/// True for an errno (or 0, the end of the stream) with which the kernel reports that the peer's process has ended.
bool is_end(int code) noexcept { return code == 0 || code == EPIPE || code == ECONNRESET; }

}  // namespace

Link::Link(Rank peer, Fd socket)
    : peer_(peer), socket_(std::move(socket)), is_tcp_(is_internet(socket_.get())) {}

bool Link::is_ended_by_peer() const noexcept {
  return state_ == State::kBroken ? is_end(broken_by_) : is_end(write_errno_);
}

std::string Link::trouble() const {
  if (state_ == State::kBroken) return trouble_;
  if (!is_end(write_errno_)) return "its connection broke: " + errno_text(write_errno_);
  return "its connection closed without a goodbye (its process ended or was killed)";
}

bool Link::is_delivered() const noexcept {
  int waiting = 0;
  // Inside a host written bytes are at the peer at once.
  return !is_tcp_ || !can_write() || ::ioctl(fd(), SIOCOUTQ, &waiting) != 0 || waiting == 0;
}

void Link::close_write() noexcept {
  if (socket_.valid()) ::shutdown(socket_.get(), SHUT_WR);
}

void Link::fail(std::string trouble, int code) {
  state_ = State::kBroken;
  trouble_ = std::move(trouble);
  broken_by_ = code;
}

std::optional<std::size_t> Link::write_some(std::span<iovec> vectors, std::span<const Fd> fds) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = vectors.size();
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    for (std::size_t i = 0; i < fds.size(); ++i) {
      const int descriptor = fds[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &descriptor, sizeof(int));
    }
  }
  while (true) {
    const auto written = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written >= 0) {
      if (traffic_ != nullptr) traffic_->sent.add(static_cast<std::uint64_t>(written));
      return static_cast<std::size_t>(written);
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) write_errno_ = errno;
    return std::nullopt;
  }
}

std::optional<std::size_t> Link::read_some(std::span<iovec> vectors, void (*take)(Link&, int)) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control;
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = vectors.size();
  if (take != nullptr) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  std::ptrdiff_t count = 0;
  while ((count = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      // If a write failed before, its error is the cause.
      const int code = is_end(write_errno_) ? errno : write_errno_;
      fail("its connection broke: " + errno_text(code), code);
    }
    return std::nullopt;
  }
  if (traffic_ != nullptr) traffic_->received.add(static_cast<std::uint64_t>(count));
  if (take != nullptr) {
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < fds; ++i) {
        int received = -1;
        std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        take(*this, received);
      }
    }
  }
  if (count == 0) {
    state_ = State::kEnded;
    return std::nullopt;
  }
  return static_cast<std::size_t>(count);
}

}  // namespace sparkhvd
