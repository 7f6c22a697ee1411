// An order, reduced to each rank's needs. The coordinator has all ranks' splits and places; sent to all,
// these would be N^2 numbers per operation. Pure: no sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "message.h"
#include "team.h"

namespace sparkhvd {

/// The `rows` of an alltoall's order, concatenated: one rank's part of all splits.
struct AlltoallRows {
  std::span<const std::int64_t> incoming;  // [member]: to this rank
  /// [local]: rows that this rank of the island sends to others of it, before this rank's. Empty on
  /// devices.
  std::span<const std::int64_t> before;
  /// The most rows that a rank of the island sends to the others of it; on devices: that any rank sends.
  std::int64_t longest = 0;

  static std::size_t count(std::size_t members, std::size_t local_size) noexcept {
    return members + local_size + 1;
  }
  AlltoallRows(std::span<const std::int64_t> rows, std::size_t members)
      : incoming(rows.first(members)),
        before(rows.subspan(members, rows.size() - members - 1)),
        longest(rows.back()) {}
};

/// Computes these rows from the splits of an order. Throws Error if the splits are impossible.
std::vector<std::int64_t> alltoall_rows(const Execute& order, const Team& team, Rank rank);

struct OrderPart {
  std::vector<Rank> to;
  Execute order;
};

/// Sends an order to all ranks of `team`, reduced to each rank's part of alltoall's splits and its island's
/// places.
std::vector<OrderPart> parts_of(Execute order, const Team& team);

}  // namespace sparkhvd
