// Trace of one operation through the engine, for counters and timeline.
#pragma once

#include "clock.h"

namespace sparkhvd {

/// Times of one operation; {} for stages that it has not reached. Written by the submitting thread
/// (`submitted`) and then by the thread that drives the engine.
struct OperationTrace {
  TimePoint submitted{};
  TimePoint agreed{};   // the coordinator's order to run it has arrived
  TimePoint started{};  // its turn has come
  /// The algorithm that ran it; a string literal. Set by the function that chooses it.
  const char* algorithm = "";
};

}  // namespace sparkhvd
