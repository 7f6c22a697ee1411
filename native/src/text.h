// Ranks, numbers and names as text for messages.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "types.h"

namespace sparkhvd {

/// "rank 3".
inline std::string rank_text(Rank rank) { return "rank " + std::to_string(index_of(rank)); }

/// "rank 3" or "ranks 1, 2 and 5".
inline std::string rank_list(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(index_of(ranks[i]));
  }
  return text;
}

/// "[1, 2, 5]".
inline std::string numbers_text(const std::vector<std::int64_t>& numbers) {
  std::string text = "[";
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  }
  return text + "]";
}

/// Warns the user on the process's standard error.
inline void warn(const std::string& text) {
  std::fprintf(stderr, "sparkhvd warning: %s\n", text.c_str());
}

/// "1.5", without a unit.
inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g", seconds);
  return text;
}

/// Removes the final period, so that the sentence can be a part of another sentence.
inline std::string without_stop(std::string sentence) {
  if (sentence.ends_with('.')) sentence.pop_back();
  return sentence;
}

/// Name of an operation for messages: "allreduce('layer3.weight')". A long name is cut, so that it fits into a message.
inline std::string operation_label(Collective collective, const std::string& name) {
  constexpr std::size_t kShown = 200;
  std::string text(name_of(collective));
  text += "('";
  text += name.size() <= kShown ? name : name.substr(0, kShown - 3) + "...";
  text += "')";
  return text;
}

}  // namespace sparkhvd
