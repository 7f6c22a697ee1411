#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Reading of the kernel's small files, without the streams of the standard library: the streams would bring in the
// locales, which take a quarter of the library in a wheel.

namespace sparkhvd {

/// The content of a file; "" if it cannot be read.
std::string read_text(const std::string& path);

/// The non-empty parts of a text between separators.
/// @param separators characters between them
std::vector<std::string_view> split(std::string_view text, std::string_view separators = " \t\n");

/// The value of an unsigned number; std::nullopt for other words, such as "max" and "-1".
std::optional<std::uint64_t> number_of(std::string_view word);

}  // namespace sparkhvd
