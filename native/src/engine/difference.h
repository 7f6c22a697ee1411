// Checks that all ranks of an operation agree on it, and writes the error message if they differ. No I/O.
#pragma once

#include <optional>
#include <string>

#include "message.h"
#include "types.h"

namespace sparkhvd {

/// A rank's description of an operation.
struct Submission {
  Rank rank;
  const Descriptor& descriptor;
};
std::optional<std::string> difference(const std::string& name, const Submission& first,
                                      const Submission& second);

}  // namespace sparkhvd
