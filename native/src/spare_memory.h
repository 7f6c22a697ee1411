// Address space for results that are too small to query every rank for memory first.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace sparkhvd {

/// From this size on every rank first reports whether it has memory for its result, because a message is cheap beside the bytes.
inline constexpr std::size_t kLargeResult = 8 << 20;

/// Space for a small result, without pages. A rank that has lost it reports this with its submissions, and then the ranks are
/// queried for small results, too.
class SpareMemory {
 public:
  SpareMemory() noexcept { restore(); }
  SpareMemory(const SpareMemory&) = delete;
  ~SpareMemory() { give(); }

  /// True if it is reserved, or reserved again.
  bool restore() noexcept {
    if (memory_ == MAP_FAILED) {
      memory_ = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    return memory_ != MAP_FAILED;
  }
  /// To the allocator.
  void give() noexcept {
    if (memory_ != MAP_FAILED) ::munmap(memory_, kBytes);
    memory_ = MAP_FAILED;
  }

 private:
  static constexpr std::size_t kBytes = kLargeResult + (64 << 10);  // and what the allocator adds

  void* memory_ = MAP_FAILED;
};

}  // namespace sparkhvd
