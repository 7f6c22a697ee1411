#include "engine/order_checks.h"

#include <algorithm>
#include <functional>

#include "collectives/spec.h"
#include "error.h"

namespace sparkhvd {

void check_contributors(const Team& team, const Execute& message) {
  const auto& ranks = message.contributors;
  if (ranks.empty()) return;
  bool ok = std::ranges::adjacent_find(ranks, std::ranges::greater_equal()) == ranks.end() &&
            message.descriptor && spec_of(message.descriptor->collective).goes_on_without_joined;
  for (const Rank rank : ranks) ok = ok && team.includes(rank);
  if (!ok) throw nonsense("invalid contributors to '" + message.name + "'");
}

void check_order(const Team& team, const Operation& operation, const Execute& message) {
  const CollectiveSpec& spec = spec_of(operation.descriptor.collective);
  const bool ok = (message.contributors.empty() || spec.goes_on_without_joined) &&
                  (spec.are_rows_possible == nullptr ||
                   spec.are_rows_possible({operation.descriptor, message, team}));
  if (!ok) throw nonsense("invalid numbers for " + operation.label());
}

bool is_contributor(const Execute& message, Rank rank) {
  return message.contributors.empty() || std::ranges::count(message.contributors, rank) > 0;
}

}  // namespace sparkhvd
