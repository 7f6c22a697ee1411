// A thread inside a connection that holds back its bytes, or limits their rate.
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

/// Relays the bytes between two ranks, which are called 0 and 1 here.
class Relay {
 public:
  static constexpr std::size_t kAnyPace = std::size_t{1} << 40;

  Relay() = default;
  Relay(const Relay&) = delete;
  ~Relay() {
    thread_ = {};
    for (const int fd : ends_) ::close(fd);
  }

  /// Inserts the thread between the two ends of a connection.
  void join(int& first, int& second) {
    ends_[0] = insert(first);
    ends_[1] = insert(second);
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }
  /// Sets the number of bytes of rank `from` that pass per millisecond. 0 holds back all bytes sent after this call.
  void let_pass(int from, std::size_t pace) {
    paces_.at(static_cast<std::size_t>(from)) = pace;
    // The thread may still be in a round with the former pace. So this waits until a whole round has begun after the
    // change.
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
