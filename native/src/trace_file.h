// A JSON array on the disk that stays valid if its writer is killed.
//
// The kernel may end a killed process's write between two pages, never within one. So the file is
// whitespace up to a closing bracket far ahead, and items go into the whitespace, each within one
// page. Only a new area of whitespace moves the bracket, by two short writes; areas double, so that
// this happens a few times in a file's life.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/fd.h"

namespace sparkhvd {

class TraceFile {
 public:
  static constexpr std::size_t kPageBytes = 4 << 10;  // or the file system's, which are multiples
  /// Longer items are dropped.
  static constexpr std::size_t kMaxItemBytes = 3 << 10;

  /// Creates or empties the file, as an empty array. Throws INVALID_ARGUMENT naming the path.
  explicit TraceFile(const std::string& path);
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;
  /// Cuts the whitespace off.
  ~TraceFile();

  /// Reserves room for about this many bytes of items, as far as the disk has it, so that the bracket need not
  /// move before they are used. Returns the error, if any.
  std::string reserve(std::uint64_t bytes);
  /// Appends one JSON value; it is in the file after flush() at the latest. Returns the error, if any; earlier
  /// items stay in the file.
  std::string append(std::string_view item);
  std::string flush();

 private:
  std::string write(std::string_view text, std::uint64_t at);

  Fd file_;
  std::uint64_t end_ = 0;      // of the items in the file
  std::uint64_t closing_ = 0;  // offset of the closing bracket's line break
  std::string page_;           // items that are not in the file yet and end in the same page
  bool has_items_ = false;
};

}  // namespace sparkhvd
