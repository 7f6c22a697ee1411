// A class that owns an epoll instance.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <span>

#include "error.h"
#include "transport/fd.h"

namespace sparkhvd {

class Poller {
 public:
  Poller() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_.valid()) throw_errno("epoll_create1");
  }

  int fd() const noexcept { return epoll_.get(); }

  void add(int fd, std::uint32_t events, std::uint64_t key) {
    control(EPOLL_CTL_ADD, fd, events, key);
  }
  void modify(int fd, std::uint32_t events, std::uint64_t key) {
    control(EPOLL_CTL_MOD, fd, events, key);
  }
  void remove(int fd) noexcept { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

  /// Waits at most `timeout_ms` (-1: without limit) and returns the pending events. Sets `interrupted` if a signal
  /// ended the wait.
  std::span<const epoll_event> wait(int timeout_ms, bool& interrupted) {
    const int count =
        ::epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
    interrupted = count < 0 && errno == EINTR;
    if (count < 0 && !interrupted) throw_errno("epoll_wait");
    return {events_.data(), count < 0 ? 0 : static_cast<std::size_t>(count)};
  }

  void close() noexcept { epoll_.reset(); }

 private:
  void control(int operation, int fd, std::uint32_t events, std::uint64_t key) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) throw_errno("epoll_ctl");
  }

  Fd epoll_;
  std::array<epoll_event, 32> events_{};
};

}  // namespace sparkhvd
