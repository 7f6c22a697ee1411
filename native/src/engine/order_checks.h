// Checks that an order is valid, before its numbers become sizes of memory. No I/O.
#pragma once

#include "message.h"
#include "operation.h"
#include "team.h"

namespace sparkhvd {

/// Throws unless the contributors of an order (all ranks without the joined ranks) are valid.
void check_contributors(const Team& team, const Execute& message);
/// Throws unless the numbers of an order are valid for the operation.
void check_order(const Team& team, const Operation& operation, const Execute& message);
bool is_contributor(const Execute& message, Rank rank);

}  // namespace sparkhvd
