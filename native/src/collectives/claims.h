// Counts in shared memory that all ranks of an island advance. Later operations reuse the words.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "communicator.h"
#include "task.h"
#include "team.h"

namespace sparkhvd {

/// A count in a reused word. The operation's number in the word makes it begin at 0 for each operation.
class TaggedCount {
 public:
  TaggedCount(SharedWord& word, std::uint64_t sequence)
      : word_(&word.value), tag_(sequence << 32) {}

  /// Adds 1 and returns the count before.
  std::uint64_t add_one() const {
    auto old = word_->load(std::memory_order_relaxed);
    while (!word_->compare_exchange_weak(old, (is_mine(old) ? old : tag_) + 1,
                                         std::memory_order_seq_cst, std::memory_order_relaxed)) {
    }
    return is_mine(old) ? old - tag_ : 0;
  }
  std::uint64_t get() const {
    const auto value = word_->load(std::memory_order_seq_cst);
    return is_mine(value) ? value - tag_ : 0;
  }

 private:
  bool is_mine(std::uint64_t value) const noexcept { return value >> 32 == tag_ >> 32; }

  std::atomic<std::uint64_t>* word_;
  std::uint64_t tag_;
};

/// Holds when a count of the island has reached `end`.
class AllCounted final : public Condition {
 public:
  AllCounted(TaggedCount count, std::uint64_t end, const Team& team)
      : count_(count), end_(end), team_(&team) {}
  bool ready() const override { return count_.get() >= end_; }
  std::vector<Rank> awaited() const override {
    auto ranks = team_->island();
    std::erase(ranks, team_->self());
    return ranks;
  }

 private:
  TaggedCount count_;
  std::uint64_t end_;
  const Team* team_;
};

}  // namespace sparkhvd
