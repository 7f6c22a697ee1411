// Trace of one operation's way through the engine, for counters and timeline.
#pragma once

#include "clock.h"

namespace sparkhvd {

/// Moments of one operation; {} where it has not come (yet). Written by the submitting thread
/// (`submitted`) and then by the thread that drives the engine.
struct OperationTrace {
  TimePoint submitted{};
  TimePoint agreed{};   // the coordinator's order to run it has come
  TimePoint started{};  // its turn has come
  /// Which algorithm ran it; a string literal. Set by the function that picks it.
  const char* algorithm = "";
};

}  // namespace sparkhvd
