// A yes-or-no question (such as "do you have memory?") that every rank of a team answers before an operation continues.
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "collectives/collectives.h"
#include "task.h"
#include "world.h"

namespace sparkhvd {

/// Holds when each of the ranks has answered.
template <class Has>
class Arrived final : public Condition {
 public:
  Arrived(Has has, std::span<const Rank> ranks) : has_(has), ranks_(ranks) {}
  bool ready() const override { return std::ranges::all_of(ranks_, has_); }
  std::vector<Rank> awaited() const override {
    std::vector<Rank> ranks;
    std::ranges::copy_if(ranks_, std::back_inserter(ranks), [this](Rank r) { return !has_(r); });
    return ranks;
  }

 private:
  Has has_;
  std::span<const Rank> ranks_;
};

/// A question and its answers.
class Answers {
 public:
  /// `key`: process set and sequence number of the operation.
  Answers(const Context& context, SegmentKey key)
      : world_(context.communicator.world()),
        key_(key),
        self_(context.team.self()),
        ranks_(context.team.ranks().begin(), context.team.ranks().end()),
        others_(ranks_) {
    std::erase(others_, self_);
  }

  void give(bool is_yes) {
    is_yes_ = is_yes;
    for (const Rank rank : others_) world_.link(rank).send(encode(SegmentMapped{key_, is_yes}));
  }

  /// Condition that holds when all ranks have answered. This object must outlive it.
  auto all() const {
    return Arrived([this](Rank rank) { return world_.mapped(key_, rank).has_value(); },
                   std::span<const Rank>(others_));
  }

  /// Returns the ranks that answered no, and forgets all answers.
  std::vector<Rank> take_refusals() {
    std::vector<Rank> ranks;
    std::ranges::copy_if(ranks_, std::back_inserter(ranks), [this](Rank rank) {
      return rank == self_ ? !is_yes_ : !world_.mapped(key_, rank).value();
    });
    world_.forget(key_);
    return ranks;
  }

 private:
  World& world_;
  SegmentKey key_;
  Rank self_;
  std::vector<Rank> ranks_;
  std::vector<Rank> others_;
  bool is_yes_ = false;
};

}  // namespace sparkhvd
