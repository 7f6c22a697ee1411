// Splits an order into the parts that each rank needs. The coordinator has the splits and places of all ranks; sending
// them to all ranks would take N^2 numbers per operation. No I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "message.h"
#include "team.h"

namespace sparkhvd {

/// The `rows` of an alltoall's order: what one rank needs to know of all ranks' splits.
struct AlltoallRows {
  std::span<const std::int64_t> incoming;  // [member]: rows that the member sends to this rank
  /// [local]: for each sender of the island, rows that it sends to ranks of the island before this rank: this rank's
  /// rows begin behind them. Empty on devices.
  std::span<const std::int64_t> before;
  /// CPU: the most rows that a rank of the island sends inside the island. Device: the most rows from a rank to a rank.
  std::int64_t longest = 0;

  static std::size_t count(std::size_t members, std::size_t local_size) noexcept {
    return members + local_size + 1;
  }
  AlltoallRows(std::span<const std::int64_t> rows, std::size_t members)
      : incoming(rows.first(members)),
        before(rows.subspan(members, rows.size() - members - 1)),
        longest(rows.back()) {}
};

/// Computes the AlltoallRows of `rank` from the splits of an order. Throws Error if the splits are invalid.
std::vector<std::int64_t> alltoall_rows(const Execute& order, const Team& team, Rank rank);

struct OrderPart {
  std::vector<Rank> to;
  Execute order;
};

/// Divides an order for the ranks of `team`: a rank gets its own part of alltoall's splits, and the places of its
/// island.
std::vector<OrderPart> parts_of(Execute order, const Team& team);

}  // namespace sparkhvd
