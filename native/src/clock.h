// Times and deadlines. Timeouts become deadlines once, at the engine's interface.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace sparkhvd {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

/// Never, for a deadline.
inline constexpr TimePoint kNever = TimePoint::max();

/// `seconds` after `now`; 0 and overflows mean never.
inline TimePoint deadline_after(TimePoint now, double seconds) noexcept {
  // A century is "never", and keeps the conversion to ticks in range.
  if (!(seconds > 0) || seconds > 3.0e9) return kNever;
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// For poll() and epoll_wait(): whole milliseconds, -1 for never.
inline int milliseconds_until(TimePoint deadline) {
  if (deadline == kNever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3600 * 1000));
}

}  // namespace sparkhvd
