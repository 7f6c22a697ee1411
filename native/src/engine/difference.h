// The facts that must be equal on all ranks of an operation, and the message if they differ. Pure.
#pragma once

#include <optional>
#include <string>

#include "message.h"
#include "types.h"

namespace sparkhvd {

/// Message on the difference of two ranks' descriptions of one operation; nothing if they agree.
struct Submission {
  Rank rank;
  const Descriptor& descriptor;
};
std::optional<std::string> difference(const std::string& name, const Submission& first,
                                      const Submission& second);

}  // namespace sparkhvd
