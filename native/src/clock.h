// Times and deadlines. The engine's interface converts a timeout into a deadline, once.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace sparkhvd {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

/// A deadline that never comes.
inline constexpr TimePoint kNever = TimePoint::max();

/// The time `seconds` after `now`; never for 0 seconds, and if the number is too large for a TimePoint.
inline TimePoint deadline_after(TimePoint now, double seconds) noexcept {
  // 3.0e9 seconds are about a century: the conversion to ticks would overflow for much larger numbers.
  if (!(seconds > 0) || seconds > 3.0e9) return kNever;
  return now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// Timeout for poll() and epoll_wait() until `deadline`, in whole milliseconds; -1 for never.
inline int milliseconds_until(TimePoint deadline) {
  if (deadline == kNever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3600 * 1000));
}

}  // namespace sparkhvd
