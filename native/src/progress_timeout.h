// The time limit of an operation. It counts from the last moved bytes, so an operation may last as long as bytes move.
// Bytes of the ranks that this rank waits for count too, because those ranks may wait for others. Before the limit
// expires, this rank asks them when they last moved bytes.
//
// **Threads.** Only the driver's thread uses it.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "clock.h"
#include "types.h"

namespace sparkhvd {

/// Requests a sign of life from a rank; its answer causes a call of `note_life`. False if the rank has left.
using AskForLife = std::function<bool(Rank)>;

class ProgressTimeout {
 public:
  TimePoint deadline() const noexcept { return deadline_; }
  /// Starts the limit again from now; 0 seconds mean no limit.
  void start(double limit_s);

  /// Call it at the deadline: sets a later deadline, or returns false if the time is over. If no bytes have moved
  /// within the limit, it first asks `others` for a sign of life and waits up to `answer_time` for their answers.
  bool extend(TimePoint moved_at, double limit_s, std::span<const Rank> others,
              const AskForLife& ask, Clock::duration answer_time = kLifeTime);
  /// Records a rank's sign of life and the time of its last bytes. True if this timeout has requested it.
  bool note_life(Rank rank, TimePoint moved_at);
  /// Ranks that have not answered the request for a sign of life.
  const std::vector<Rank>& unanswered() const noexcept { return unanswered_; }

 private:
  /// Time for the answer: a running process answers within milliseconds.
  static constexpr auto kLifeTime = std::chrono::seconds(1);

  TimePoint deadline_ = kNever;
  TimePoint moved_at_{};  // time of the last bytes on the ranks that have answered
  bool has_asked_ = false;
  std::vector<Rank> unanswered_;
};

}  // namespace sparkhvd
