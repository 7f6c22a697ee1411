#include "progress_timeout.h"

#include <algorithm>

namespace sparkhvd {

void ProgressTimeout::start(double limit_s) {
  deadline_ = deadline_after(Clock::now(), limit_s);
  has_asked_ = false;
  unanswered_.clear();
}

bool ProgressTimeout::extend(TimePoint moved_at, double limit_s, std::span<const Rank> others,
                             const AskForLife& ask, Clock::duration answer_time) {
  if (!unanswered_.empty()) return false;
  const TimePoint now = Clock::now();
  deadline_ = deadline_after(std::max(moved_at, moved_at_), limit_s);
  if (now < deadline_) {
    has_asked_ = false;
    return true;
  }
  if (has_asked_) return false;
  has_asked_ = true;
  std::ranges::copy_if(others, std::back_inserter(unanswered_), ask);
  deadline_ = now + answer_time;
  return !unanswered_.empty();
}

bool ProgressTimeout::note_life(Rank rank, TimePoint moved_at) {
  if (std::erase(unanswered_, rank) == 0) return false;
  moved_at_ = std::max(moved_at_, moved_at);
  if (unanswered_.empty()) deadline_ = Clock::now();
  return true;
}

}  // namespace sparkhvd
