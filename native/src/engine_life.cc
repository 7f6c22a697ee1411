// Ranks of this host whose process has ended, seen before their connections close. Called by the driver
// (see engine.h).
#include <algorithm>

#include "engine.h"
#include "transport/life_word.h"

namespace sparkhvd {
namespace {

// How often a rank that sleeps in an operation looks for them: a wake-up of 10 us each time.
constexpr auto kLookPeriod = std::chrono::milliseconds(15);

}  // namespace

/// When a rank that sleeps looks for ended ones: soon while an operation is in flight, else never, for an
/// idle engine costs nothing and learns of it when the connection closes.
TimePoint Engine::next_look() const {
  if (has_failed_ || !world_->memory()) return kNever;
  const std::scoped_lock lock(mutex_);
  return in_flight_.empty() ? kNever : Clock::now() + kLookPeriod;
}

/// What they said last is read first. True if that was anything, or one is lost.
bool Engine::look_for_ended() {
  bool found = false;
  for (const Rank rank : world_->ended_mates()) {
    ControlLink& link = world_->link(rank);
    while (!has_failed_ && link.is_open() && read_link(link)) found = true;
    if (has_failed_) return true;
    if (!link.is_open() || said_goodbye_[static_cast<std::size_t>(index_of(rank))]) continue;
    lose(rank, link.trouble());
    return true;
  }
  return found;
}

}  // namespace sparkhvd
