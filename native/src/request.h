// Reading of the requests that callers pass through the C interface: checks them and copies them into an Operation.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "error.h"
#include "operation.h"
#include "sparkhvd.h"

namespace sparkhvd {

/// Copies the caller's structure. Fields that an older caller does not know get their values from `defaults`.
template <class Struct>
Struct read_struct(const Struct* given, Struct defaults, const char* what) {
  if (given == nullptr) invalid(std::string(what) + " is NULL.");
  if (given->struct_size < sizeof(given->struct_size)) {
    invalid(std::string(what) + ".struct_size is not set.");
  }
  std::memcpy(&defaults, given, std::min<std::size_t>(given->struct_size, sizeof(Struct)));
  return defaults;
}

/// Converts a request. Throws InvalidArgument or UNSUPPORTED with the operation, the wrong value and the remedy.
std::shared_ptr<Operation> read_request(const sparkhvd_request* given, const Engine& engine);

}  // namespace sparkhvd
