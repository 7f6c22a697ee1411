#include "trace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "error.h"
#include "text.h"

namespace sparkhvd {
namespace {

constexpr std::string_view kClosing = "\n]\n";
constexpr std::uint64_t kLargestArea = 16 << 20;
constexpr std::size_t kBlankBytes = 64 << 10;  // bytes of whitespace per write

Fd open_file(const std::string& path) {
  const auto fail = [&path](const std::string& found) {
    throw Error(SPARKHVD_INVALID_ARGUMENT,
                "start_timeline('" + path + "'): " + found +
                    ". Give a path of a file that this process may write.");
  };
  // O_NONBLOCK: if the path is a named pipe, open() must not wait for a reader. The flag has no effect on a file.
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666));
  if (!file.valid()) fail(errno_text(errno));
  struct stat found{};
  if (::fstat(file.get(), &found) != 0) fail(errno_text(errno));
  if (!S_ISREG(found.st_mode)) fail("it is not a plain file");
  if (::ftruncate(file.get(), 0) != 0) fail(errno_text(errno));
  return file;
}

std::uint64_t room_in_page(std::uint64_t at) {
  return TraceFile::kPageBytes - at % TraceFile::kPageBytes;
}

}  // namespace

TraceFile::TraceFile(const std::string& path) : file_(open_file(path)) {
  std::string trouble = write("[\n]\n", 0);
  end_ = closing_ = 1;
  if (trouble.empty()) trouble = reserve(kPageBytes);
  if (!trouble.empty()) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, "start_timeline('" + path +
                                               "'): writing failed: " + trouble +
                                               ". Make room on the disk, or choose another path.");
  }
}

TraceFile::~TraceFile() {
  [[maybe_unused]] const auto lost = flush();
  // If the process is killed between the two calls, the first closing bracket still ends valid JSON.
  if (write(kClosing, end_).empty()) {
    [[maybe_unused]] const auto cut =
        ::ftruncate(file_.get(), static_cast<off_t>(end_ + kClosing.size()));
  }
}

std::string TraceFile::append(std::string_view item) {
  if (item.size() > kMaxItemBytes) return {};
  const std::string_view separator = has_items_ ? ",\n" : "\n";
  const std::size_t bytes = separator.size() + item.size();
  if (page_.size() + bytes > room_in_page(end_) || end_ + page_.size() + bytes > closing_) {
    if (auto trouble = flush(); !trouble.empty()) return trouble;
    const auto room = room_in_page(end_);
    const std::uint64_t begin = bytes > room ? end_ + room : end_;
    while (begin + bytes > closing_) {
      if (auto trouble = reserve(std::min(closing_, kLargestArea)); !trouble.empty())
        return trouble;
    }
    end_ = begin;
  }
  page_ += separator;
  page_ += item;
  has_items_ = true;
  return {};
}

std::string TraceFile::flush() {
  if (page_.empty()) return {};
  auto trouble = write(page_, end_);
  if (trouble.empty()) end_ += page_.size();
  page_.clear();
  return trouble;
}

/// Moves the closing bracket. It first writes whitespace behind the bracket, which does not affect a reader.
std::string TraceFile::reserve(std::uint64_t bytes) {
  const std::uint64_t begin = closing_ + kClosing.size();
  std::string trouble;
  for (std::uint64_t area = std::max<std::uint64_t>(bytes, kPageBytes); area >= kPageBytes;
       area /= 2) {
    const std::uint64_t end = (begin + area) / kPageBytes * kPageBytes;
    for (std::uint64_t at = begin; at < end && trouble.empty(); at += kBlankBytes) {
      trouble = write(std::string(std::min<std::uint64_t>(kBlankBytes, end - at), ' '), at);
    }
    if (trouble.empty()) {
      const std::uint64_t closing = end - kClosing.size();
      if (trouble = write(std::string(kClosing.size(), ' '), closing_); !trouble.empty()) break;
      if (trouble = write(kClosing, closing); !trouble.empty()) break;
      closing_ = closing;
      return {};
    }
    // The disk may have room for a smaller area. The partial area is cut off, because other programs need the room too.
    if (::ftruncate(file_.get(), static_cast<off_t>(begin)) != 0) break;
    if (area / 2 >= kPageBytes) trouble.clear();
  }
  return trouble;
}

std::string TraceFile::write(std::string_view text, std::uint64_t at) {
  std::size_t done = 0;
  while (done < text.size()) {
    const auto count = ::pwrite(file_.get(), text.data() + done, text.size() - done,
                                static_cast<off_t>(at + done));
    if (count > 0) {
      done += static_cast<std::size_t>(count);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    return count == 0 ? "nothing could be written" : errno_text(errno);
  }
  return {};
}

}  // namespace sparkhvd
