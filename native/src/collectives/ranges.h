// Ranges of a long sequence, addressed as one shorter sequence.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace sparkhvd {

/// A range of elements or bytes.
struct Range {
  std::size_t begin = 0;
  std::size_t size = 0;
};

/// Part `index` of `count` elements that are cut into `parts` nearly equal ranges, at multiples of a cache line.
inline Range part_of(std::size_t count, std::size_t parts, std::size_t index,
                     std::size_t element_bytes) noexcept {
  const std::size_t line = 64 / element_bytes;
  const std::size_t step = ((count + parts - 1) / parts + line - 1) / line * line;
  const std::size_t begin = std::min(count, index * step);
  return {begin, std::min(count - begin, step)};
}

class RangeList {
 public:
  void add(Range range) {
    if (range.size == 0) return;
    entries_.push_back({range, total_});
    total_ += range.size;
  }

  std::size_t size() const noexcept { return total_; }

  /// Calls `use(position in the long sequence, offset from begin, size)` for the pieces of [begin, begin + size) of the
  /// short sequence, in order, up to its end.
  template <class Use>
  void for_range(std::size_t begin, std::size_t size, Use use) const {
    if (begin >= total_) return;
    const std::size_t end = std::min(total_, begin + size);
    auto entry = std::ranges::upper_bound(entries_, begin, {}, &Entry::start) - 1;
    for (; entry != entries_.end() && entry->start < end; ++entry) {
      const std::size_t from = std::max(begin, entry->start);
      const std::size_t to = std::min(end, entry->start + entry->range.size);
      use(entry->range.begin + (from - entry->start), from - begin, to - from);
    }
  }

 private:
  struct Entry {
    Range range;
    std::size_t start;  // position in the short sequence
  };
  std::vector<Entry> entries_;
  std::size_t total_ = 0;
};

}  // namespace sparkhvd
