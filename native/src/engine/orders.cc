#include "engine/orders.h"

#include <algorithm>
#include <utility>

#include "error.h"

namespace sparkhvd {
namespace {

void check_splits(const std::vector<std::int64_t>& splits, std::size_t members) {
  const auto is_possible = [](std::int64_t rows) {
    return rows >= 0 && static_cast<std::uint64_t>(rows) <= kMaxTensorBytes;
  };
  if (splits.size() == members * members && std::ranges::all_of(splits, is_possible)) return;
  throw Error(SPARKHVD_PEER_LOST, "impossible splits");
}

/// Places of the contributors in this island, from the order's places of all contributors.
std::vector<Place> places_in(const std::vector<Rank>& island, const Execute& order,
                             std::span<const Rank> contributors) {
  std::vector<Place> places;
  for (std::size_t i = 0; i < contributors.size(); ++i) {
    if (std::ranges::count(island, contributors[i]) > 0) places.push_back(order.places.at(i));
  }
  return places;
}

}  // namespace

std::vector<std::int64_t> alltoall_rows(const Execute& order, const Team& team, Rank rank) {
  const std::size_t members = team.size();
  check_splits(order.splits, members);
  const auto rows = [&](std::size_t from, std::size_t to) {
    return order.splits[from * members + to];
  };
  const std::size_t me = team.index_in(rank);
  std::vector<std::int64_t> result;
  for (std::size_t from = 0; from < members; ++from) result.push_back(rows(from, me));
  std::int64_t longest = 0;
  if (order.is_on_device) {
    for (std::size_t from = 0; from < members; ++from) {
      for (std::size_t to = 0; to < members; ++to) longest = std::max(longest, rows(from, to));
    }
  } else {
    const auto& island = team.islands()[team.island_index_of(rank)];
    for (const Rank mate : island) {
      const std::size_t from = team.index_in(mate);
      std::int64_t length = 0;
      std::int64_t before = 0;
      for (const Rank other : island) {
        if (other == mate) continue;
        if (other == rank) before = length;
        length += rows(from, team.index_in(other));
      }
      result.push_back(before);
      longest = std::max(longest, length);
    }
  }
  result.push_back(longest);
  return result;
}

std::vector<OrderPart> parts_of(Execute order, const Team& team) {
  std::vector<OrderPart> parts;
  const auto ranks = team.ranks();
  if (order.splits.empty() && (order.places.empty() || team.is_one_island())) {
    parts.push_back({{ranks.begin(), ranks.end()}, std::move(order)});
    return parts;
  }
  Execute rest = order;
  rest.splits.clear();
  rest.places.clear();
  if (!order.splits.empty()) {
    for (const Rank rank : ranks) {
      parts.push_back({{rank}, rest});
      parts.back().order.rows = alltoall_rows(order, team, rank);
    }
    return parts;
  }
  const auto contributors =
      order.contributors.empty() ? ranks : std::span<const Rank>(order.contributors);
  for (const auto& island : team.islands()) {
    parts.push_back({island, rest});
    parts.back().order.places = places_in(island, order, contributors);
  }
  return parts;
}

}  // namespace sparkhvd
