// Time limits of operations that last as long as bytes move, with ranks that answer, do not answer, or have left.
#include "progress_timeout.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "test.h"

namespace sparkhvd::test::progress_timeout_test {
namespace {

constexpr double kLimit_s = 60;
constexpr auto kLongAgo = std::chrono::seconds(61);
const std::vector<Rank> kOthers = {Rank{1}, Rank{2}};

/// Records the ranks that were asked for a sign of life.
struct Questions {
  bool operator()(Rank rank) {
    if (std::ranges::count(left, rank) > 0) return false;
    asked.push_back(rank);
    return true;
  }
  std::vector<Rank> left = {};
  std::vector<Rank> asked = {};
};

TEST(a_time_limit_restarts_while_bytes_move_and_asks_no_rank) {
  Questions questions;
  ProgressTimeout timeout;
  timeout.start(kLimit_s);
  CHECK(timeout.extend(Clock::now(), kLimit_s, kOthers, std::ref(questions)));
  CHECK(timeout.deadline() > Clock::now() + std::chrono::seconds(59));
  CHECK(questions.asked.empty());
  timeout.start(0);
  CHECK(timeout.deadline() == kNever);
}

TEST(a_time_limit_lasts_as_long_as_bytes_move_on_a_rank_that_is_asked) {
  Questions questions;
  ProgressTimeout timeout;
  for (int round = 1; round <= 2; ++round) {
    CHECK(timeout.extend(Clock::now() - kLongAgo, kLimit_s, kOthers, std::ref(questions)));
    CHECK_EQUAL(questions.asked.size(), static_cast<std::size_t>(2 * round));
    CHECK(timeout.note_life(Rank{1}, Clock::now() - kLongAgo));
    CHECK(!timeout.note_life(Rank{1}, Clock::now()));  // the rank was not asked again
    CHECK(timeout.note_life(Rank{2}, Clock::now()));
    CHECK(timeout.deadline() <= Clock::now());
    CHECK(timeout.extend(Clock::now() - kLongAgo, kLimit_s, kOthers, std::ref(questions)));
    CHECK(timeout.deadline() > Clock::now() + std::chrono::seconds(59));
    timeout = {};
  }
}

TEST(a_time_limit_is_over_when_nothing_moves_anywhere) {
  Questions questions;
  ProgressTimeout timeout;
  CHECK(timeout.extend(Clock::now() - kLongAgo, kLimit_s, kOthers, std::ref(questions)));
  for (const Rank rank : kOthers) CHECK(timeout.note_life(rank, Clock::now() - kLongAgo));
  CHECK(!timeout.extend(Clock::now() - kLongAgo, kLimit_s, kOthers, std::ref(questions)));
  CHECK(timeout.unanswered().empty());
}

TEST(a_time_limit_names_who_did_not_answer) {
  Questions questions;
  ProgressTimeout timeout;
  CHECK(timeout.extend(Clock::now() - kLongAgo, kLimit_s, kOthers, std::ref(questions)));
  CHECK(timeout.note_life(Rank{1}, Clock::now()));
  CHECK(!timeout.extend(Clock::now(), kLimit_s, kOthers, std::ref(questions)));
  CHECK(timeout.unanswered() == std::vector<Rank>{Rank{2}});
}

TEST(a_time_limit_is_over_at_once_when_everybody_has_left) {
  Questions questions{.left = kOthers};
  ProgressTimeout timeout;
  CHECK(!timeout.extend(Clock::now() - kLongAgo, kLimit_s, kOthers, std::ref(questions)));
}

}  // namespace
}  // namespace sparkhvd::test::progress_timeout_test
