#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Small files of the kernel, without the streams of the standard library: these bring its locales, a
// quarter of the library that a wheel has.

namespace sparkhvd {

/// The content of a file; "" if it cannot be read.
std::string read_text(const std::string& path);

/// The non-empty parts of a text.
/// @param separators characters between them
std::vector<std::string_view> split(std::string_view text, std::string_view separators = " \t\n");

/// The value of a numeric word; nothing for other words, such as "max" and "-1".
std::optional<std::uint64_t> number_of(std::string_view word);

}  // namespace sparkhvd
