// What an order must say to be possible: its numbers become sizes of memory. Pure: no sockets.
#pragma once

#include "message.h"
#include "operation.h"
#include "team.h"

namespace sparkhvd {

/// Throws unless those who take part in an operation without the ones that have joined can be.
void check_contributors(const Team& team, const Execute& message);
/// Throws unless the coordinator's numbers can be.
void check_order(const Team& team, const Operation& operation, const Execute& message);
bool is_contributor(const Execute& message, Rank rank);

}  // namespace sparkhvd
