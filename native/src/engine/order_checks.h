// Validity checks of an order, whose numbers become sizes of memory. Pure: no sockets.
#pragma once

#include "message.h"
#include "operation.h"
#include "team.h"

namespace sparkhvd {

/// Throws unless the contributors of an operation, without joined ranks, are possible.
void check_contributors(const Team& team, const Execute& message);
/// Throws unless the coordinator's numbers are possible.
void check_order(const Team& team, const Operation& operation, const Execute& message);
bool is_contributor(const Execute& message, Rank rank);

}  // namespace sparkhvd
