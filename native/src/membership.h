// A rank's view of the job's members and losses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace sparkhvd {

struct Membership {
  Rank self{};
  std::vector<std::int32_t> hosts;  // by rank

  std::size_t size() const noexcept { return hosts.size(); }
  std::int32_t host_of(Rank rank) const { return hosts[static_cast<std::size_t>(index_of(rank))]; }
  bool includes(Rank rank) const noexcept {
    return index_of(rank) >= 0 && static_cast<std::size_t>(index_of(rank)) < size();
  }
};

/// How a rank was lost. The numbers are in sparkhvd.h and on the wire, so they must not change.
enum class LossKind : std::uint8_t {
  kDead = SPARKHVD_DEAD,      // its process has ended
  kSilent = SPARKHVD_SILENT,  // its process may live, but does not answer, or its connection broke
  kLeft = SPARKHVD_LEFT,      // it has sent a goodbye
};

struct Loss {
  Rank rank{};
  LossKind kind{};
  bool operator==(const Loss&) const = default;
};

}  // namespace sparkhvd
