// Times of the stages of one operation, for counters and timeline.
#pragma once

#include "clock.h"

namespace sparkhvd {

/// Times of one operation; {} for stages that it has not reached. The submitting thread writes `submitted`, the thread
/// that drives the engine writes the rest.
struct OperationTrace {
  TimePoint submitted{};
  TimePoint agreed{};   // the coordinator's order to run the operation arrived
  TimePoint started{};  // the operation started, after all earlier operations of its set
  /// Name of the algorithm, a string literal. The function that chooses the algorithm sets it.
  const char* algorithm = "";
};

}  // namespace sparkhvd
