// Accessors of the operations of messages (send and receive).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "operation.h"
#include "point_to_point/matching.h"
#include "text.h"

namespace sparkhvd {

inline std::int64_t tag_of(const Operation& operation) {
  return operation.descriptor.numbers.at(0);
}

inline bool is_send(const Operation& operation) {
  return operation.descriptor.collective == Collective::kSend;
}

/// True if a receive accepts messages that are shorter than its tensor.
inline bool takes_shorter(const Operation& operation) {
  const auto& numbers = operation.descriptor.numbers;
  return numbers.size() > 1 && numbers[1] == 1;
}

inline std::string tag_text(const Operation& operation) {
  return " with tag " + std::to_string(tag_of(operation));
}

/// "rank 3", or "any rank" for a receive that accepts any sender.
inline std::string peer_text(const Operation& operation) {
  const Rank rank = operation.descriptor.root;
  return rank == kAnyRank ? "any rank" : rank_text(rank);
}

inline std::span<const std::byte> input_of(const Operation& operation) {
  std::span<const std::byte> result;
  operation.pieces.for_range(0, operation.pieces.bytes(),
                             [&](const Pieces::Part& part) { result = {part.input, part.bytes}; });
  return result;
}

inline std::span<std::byte> output_of(const Operation& operation) {
  std::span<std::byte> result;
  operation.pieces.for_range(0, operation.pieces.bytes(),
                             [&](const Pieces::Part& part) { result = {part.output, part.bytes}; });
  return result;
}

}  // namespace sparkhvd
