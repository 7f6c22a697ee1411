// A JSON array in a file that stays valid if its writer is killed.
//
// The kernel may cut a killed process's write between two pages, but never inside a page. So the file has whitespace up
// to a closing bracket far ahead. Each item overwrites whitespace inside one page. When the whitespace is used up, two
// short writes move the bracket behind a new area of whitespace. Each area is twice as large as the last, so this
// happens only a few times per file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/fd.h"

namespace sparkhvd {

class TraceFile {
 public:
  static constexpr std::size_t kPageBytes = 4 << 10;  // larger pages are multiples of this
  /// `append` drops longer items.
  static constexpr std::size_t kMaxItemBytes = 3 << 10;

  /// Creates or empties the file and writes an empty array. Throws INVALID_ARGUMENT with the path if this fails.
  explicit TraceFile(const std::string& path);
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;
  /// Writes the remaining items and cuts off the unused whitespace.
  ~TraceFile();

  /// Writes about `bytes` of whitespace, or less if the disk has less room, so that the next items need not move the
  /// bracket. Returns the error, if any.
  std::string reserve(std::uint64_t bytes);
  /// Appends one JSON value; it is in the file after flush() at the latest. Returns the error, if any. Earlier items
  /// stay in the file.
  std::string append(std::string_view item);
  std::string flush();

 private:
  std::string write(std::string_view text, std::uint64_t at);

  Fd file_;
  std::uint64_t end_ = 0;      // offset behind the last item in the file
  std::uint64_t closing_ = 0;  // offset of the closing bracket's line break
  std::string page_;           // items that are not in the file yet and end in the same page
  bool has_items_ = false;
};

}  // namespace sparkhvd
