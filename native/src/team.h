// The ranks of one operation, grouped into islands of shared memory. A plain value without sockets or memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "types.h"

namespace sparkhvd {

/// The ranks of one operation. An *island* is a set of ranks that have mapped each other's memory. A rank without
/// shared memory is alone in its island. Islands are in the order of their first rank, the ranks of an island in
/// ascending order.
class Team {
 public:
  Team() = default;
  /// `islands` need not be sorted, and empty islands are dropped. `self` need not be in an island.
  Team(Rank self, std::vector<std::vector<Rank>> islands) : self_(self) {
    std::erase_if(islands, [](const auto& island) { return island.empty(); });
    for (auto& island : islands) std::ranges::sort(island);
    std::ranges::sort(islands, {}, [](const auto& island) { return island[0]; });
    islands_ = std::move(islands);
    num_lanes_ = islands_.empty() ? 0 : islands_[0].size();
    for (std::size_t i = 0; i < islands_.size(); ++i) {
      ranks_.insert(ranks_.end(), islands_[i].begin(), islands_[i].end());
      num_lanes_ = std::min(num_lanes_, islands_[i].size());
      const auto place = std::ranges::find(islands_[i], self);
      if (place == islands_[i].end()) continue;
      island_ = i;
      local_ = static_cast<std::size_t>(place - islands_[i].begin());
    }
    std::ranges::sort(ranks_);
    index_ = index_in(self);
  }

  /// The members in ascending order. A member's *index* is its position in this list.
  std::span<const Rank> ranks() const noexcept { return ranks_; }
  std::size_t size() const noexcept { return ranks_.size(); }
  Rank self() const noexcept { return self_; }
  /// This rank's index.
  std::size_t index() const noexcept { return index_; }
  /// Index of `rank`; `size()` if it is not a member.
  std::size_t index_in(Rank rank) const noexcept {
    const auto place = std::ranges::lower_bound(ranks_, rank);
    const bool is_member = place != ranks_.end() && *place == rank;
    return is_member ? static_cast<std::size_t>(place - ranks_.begin()) : ranks_.size();
  }
  bool includes(Rank rank) const noexcept { return index_in(rank) < ranks_.size(); }

  const std::vector<std::vector<Rank>>& islands() const noexcept { return islands_; }
  std::size_t island_index() const noexcept { return island_; }
  /// Index of a member's island.
  std::size_t island_index_of(Rank rank) const {
    return static_cast<std::size_t>(
        std::ranges::find_if(
            islands_, [&](const auto& island) { return std::ranges::count(island, rank) > 0; }) -
        islands_.begin());
  }
  const std::vector<Rank>& island() const noexcept { return islands_[island_]; }
  std::size_t local_index() const noexcept { return local_; }
  std::size_t local_size() const noexcept { return island().size(); }
  /// Size of the smallest island. In an exchange between islands this number of ranks of each island takes part, each
  /// with its counterparts in the other islands.
  std::size_t num_lanes() const noexcept { return num_lanes_; }
  bool is_one_island() const noexcept { return islands_.size() == 1; }
  /// True if no two ranks share memory.
  bool is_all_alone() const noexcept { return islands_.size() == ranks_.size(); }

  /// A Team with the same islands, without the ranks that are not in `members`.
  Team restricted(std::span<const Rank> members) const {
    auto islands = islands_;
    for (auto& island : islands) {
      std::erase_if(island, [&](Rank rank) { return std::ranges::count(members, rank) == 0; });
    }
    return {self_, std::move(islands)};
  }

 private:
  Rank self_{};
  std::vector<Rank> ranks_;
  std::vector<std::vector<Rank>> islands_;
  std::size_t index_ = 0;
  std::size_t island_ = 0;
  std::size_t local_ = 0;
  std::size_t num_lanes_ = 0;
};

}  // namespace sparkhvd
