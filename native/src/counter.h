// A number that grows.
#pragma once

#include <atomic>
#include <cstdint>

namespace sparkhvd {

/// Read by any thread at any time, without stopping the counting thread.
class Counter {
 public:
  /// Any thread.
  void add(std::uint64_t amount = 1) noexcept {
    value_.fetch_add(amount, std::memory_order_relaxed);
  }
  /// Cheaper; never by two threads at the same time.
  void add_alone(std::uint64_t amount = 1) noexcept {
    value_.store(value() + amount, std::memory_order_relaxed);
  }
  void raise_alone(std::uint64_t to) noexcept {
    if (to > value()) value_.store(to, std::memory_order_relaxed);
  }
  std::uint64_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// Bytes through connections, frames included.
struct Traffic {
  Counter sent;
  Counter received;
};

}  // namespace sparkhvd
