#include "text_file.h"

#include <array>
#include <charconv>
#include <cstdio>

namespace sparkhvd {

std::string read_text(const std::string& path) {
  std::string text;
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return text;
  std::array<char, 4096> part;
  while (const auto count = std::fread(part.data(), 1, part.size(), file)) {
    text.append(part.data(), count);
  }
  std::fclose(file);
  return text;
}

std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> found;
  while (true) {
    const auto begin = text.find_first_not_of(separators);
    if (begin == std::string_view::npos) return found;
    text.remove_prefix(begin);
    found.push_back(text.substr(0, text.find_first_of(separators)));
    text.remove_prefix(found.back().size());
  }
}

std::optional<std::uint64_t> number_of(std::string_view word) {
  std::uint64_t value = 0;
  const char* const end = word.data() + word.size();
  const auto [stopped, problem] = std::from_chars(word.data(), end, value);
  if (problem != std::errc() || stopped != end) return std::nullopt;
  return value;
}

}  // namespace sparkhvd
