// The time limit of an operation, which may last as long as bytes move: it counts from the last movement, here or on the
// ranks that it waits for, which may wait themselves. These are queried before it expires.
//
// **Threads.** The driver's.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "clock.h"
#include "types.h"

namespace sparkhvd {

/// Requests a sign of life from a rank: `note_life` follows. False if it has left.
using AskForLife = std::function<bool(Rank)>;

class ProgressTimeout {
 public:
  TimePoint deadline() const noexcept { return deadline_; }
  /// Restarts; 0 seconds: no limit.
  void start(double limit_s);

  /// At the deadline: false if the time is over. First queries `others`, which have `answer_time` for a sign of life,
  /// unless bytes have moved here within the limit.
  bool extend(TimePoint moved_at, double limit_s, std::span<const Rank> others,
              const AskForLife& ask, Clock::duration answer_time = kLifeTime);
  /// A rank lives, with the time of its last bytes. True if that was requested.
  bool note_life(Rank rank, TimePoint moved_at);
  /// Queried ranks without an answer.
  const std::vector<Rank>& unanswered() const noexcept { return unanswered_; }

 private:
  /// A running process answers within milliseconds.
  static constexpr auto kLifeTime = std::chrono::seconds(1);

  TimePoint deadline_ = kNever;
  TimePoint moved_at_{};  // on the ranks that have answered
  bool has_asked_ = false;
  std::vector<Rank> unanswered_;
};

}  // namespace sparkhvd
