// Counters of events and bytes.
#pragma once

#include <atomic>
#include <cstdint>

namespace sparkhvd {

/// A growing number. Any thread may read it at any time, without stopping the counting thread.
class Counter {
 public:
  /// Adds; several threads may call it at the same time.
  void add(std::uint64_t amount = 1) noexcept {
    value_.fetch_add(amount, std::memory_order_relaxed);
  }
  /// Adds at less cost than `add`; two threads must not call it at the same time.
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

/// Bytes sent and received through connections, including frame headers.
struct Traffic {
  Counter sent;
  Counter received;
};

}  // namespace sparkhvd
