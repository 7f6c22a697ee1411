// The time limit of an operation, which may last as long as bytes move: what counts is how long nothing has moved, here
// or on the ranks that it waits for, which may wait themselves. These are asked before it is over.
//
// **Threads.** The driver's.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "clock.h"
#include "types.h"

namespace sparkhvd {

/// Asks a rank for a sign of life: `note_life` follows. False if it has left.
using AskForLife = std::function<bool(Rank)>;

class ProgressTimeout {
 public:
  TimePoint deadline() const noexcept { return deadline_; }
  /// Begins anew; 0 seconds: there is no limit.
  void start(double limit_s);

  /// At the deadline: false if the time is over. First asks `others`, who have `answer_time` for a sign of life, unless
  /// bytes have moved here within the limit.
  bool extend(TimePoint moved_at, double limit_s, std::span<const Rank> others,
              const AskForLife& ask, Clock::duration answer_time = kLifeTime);
  /// A rank lives, and moved bytes last then. True if that was asked.
  bool note_life(Rank rank, TimePoint moved_at);
  /// Who has been asked and has not answered.
  const std::vector<Rank>& unanswered() const noexcept { return unanswered_; }

 private:
  /// A process that runs answers within milliseconds.
  static constexpr auto kLifeTime = std::chrono::seconds(1);

  TimePoint deadline_ = kNever;
  TimePoint moved_at_{};  // on those that have answered
  bool has_asked_ = false;
  std::vector<Rank> unanswered_;
};

}  // namespace sparkhvd
