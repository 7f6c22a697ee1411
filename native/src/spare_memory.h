// Address space for results that are too small for asking every rank first whether it has memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace sparkhvd {

/// From here on every rank says whether it has memory for its result: a message is nothing beside the bytes.
inline constexpr std::size_t kLargeResult = 8 << 20;

/// As much as a small result needs, without pages. A rank that has given it away says so when it submits an operation, and
/// then the ranks are asked for small results, too.
class SpareMemory {
 public:
  SpareMemory() noexcept { restore(); }
  SpareMemory(const SpareMemory&) = delete;
  ~SpareMemory() { give(); }

  /// True if it is there, or there again.
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
