// An order as each rank needs it. The coordinator knows everybody's splits and places; told to all,
// these would be N^2 numbers in an operation. Pure: no sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "message.h"
#include "team.h"

namespace sparkhvd {

/// The `rows` of an alltoall's order, one after the other: what one rank must know of all splits.
struct AlltoallRows {
  std::span<const std::int64_t> incoming;  // [member]: to this rank
  /// [local]: rows that this rank of the island gives to others of it, ahead of this rank's. None on
  /// devices.
  std::span<const std::int64_t> before;
  /// The most that a rank of the island gives to the others of it; on devices: that any rank gives.
  std::int64_t longest = 0;

  static std::size_t count(std::size_t members, std::size_t local_size) noexcept {
    return members + local_size + 1;
  }
  AlltoallRows(std::span<const std::int64_t> rows, std::size_t members)
      : incoming(rows.first(members)),
        before(rows.subspan(members, rows.size() - members - 1)),
        longest(rows.back()) {}
};

/// Makes these rows from the splits of an order. Throws Error if the splits cannot be.
std::vector<std::int64_t> alltoall_rows(const Execute& order, const Team& team, Rank rank);

struct OrderPart {
  std::vector<Rank> to;
  Execute order;
};

/// An order to all ranks of `team`, cut to what each needs: of alltoall's splits those that concern
/// it, of places those of its island.
std::vector<OrderPart> parts_of(Execute order, const Team& team);

}  // namespace sparkhvd
