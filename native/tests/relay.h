// A connection through a thread that holds its bytes back, or lets them pass at a pace.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <thread>
#include <vector>

namespace sparkhvd::test {

/// Between two ranks, the first of which is 0 here and the second 1.
class Relay {
 public:
  static constexpr std::size_t kAnyPace = std::size_t{1} << 40;

  Relay() = default;
  Relay(const Relay&) = delete;
  ~Relay() {
    thread_ = {};
    for (const int fd : ends_) ::close(fd);
  }

  /// The ends of a connection; from now on bytes between them pass through the thread.
  void join(int& first, int& second) {
    ends_[0] = insert(first);
    ends_[1] = insert(second);
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }
  /// Bytes of rank `from` that pass in a millisecond: 0 holds back whatever is sent after this call.
  void let_pass(int from, std::size_t pace) {
    paces_.at(static_cast<std::size_t>(from)) = pace;
    // The thread may have read the former pace, and receive only now: a whole round must begin after the change.
    const std::size_t rounds = rounds_;
    while (thread_.joinable() && rounds_ < rounds + 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::size_t passed(int from) const { return passed_.at(static_cast<std::size_t>(from)); }

 private:
  static int insert(int& end) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
      throw std::runtime_error("socketpair");
    }
    ::fcntl(pair[0], F_SETFL, O_NONBLOCK);
    ::close(end);
    end = pair[1];
    return pair[0];
  }

  void run(const std::stop_token& stop) {
    std::array<std::vector<std::byte>, 2> kept;
    std::array<bool, 2> has_ended{};
    while (!stop.stop_requested()) {
      for (std::size_t from = 0; from < 2; ++from) {
        auto& bytes = kept.at(from);
        const int to = ends_.at(1 - from);
        if (bytes.empty() && !has_ended.at(from) && paces_.at(from) > 0) {
          bytes.resize(std::min(paces_.at(from).load(), std::size_t{1} << 20));
          const auto count = ::recv(ends_.at(from), bytes.data(), bytes.size(), 0);
          bytes.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
          if (count == 0) {
            has_ended.at(from) = true;
            ::shutdown(to, SHUT_WR);
          }
        }
        if (bytes.empty()) continue;
        const auto count = ::send(to, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (count <= 0) continue;
        bytes.erase(bytes.begin(), bytes.begin() + count);
        passed_.at(from) += static_cast<std::size_t>(count);
      }
      ++rounds_;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::array<int, 2> ends_{-1, -1};
  std::array<std::atomic<std::size_t>, 2> paces_{kAnyPace, kAnyPace};
  std::array<std::atomic<std::size_t>, 2> passed_{};
  std::atomic<std::size_t> rounds_{0};
  std::jthread thread_;
};

}  // namespace sparkhvd::test
