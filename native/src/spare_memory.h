// Address space that a rank reserves for small results.
//
// Before a large result every rank reports whether it has memory for it. For a small result this would take too long,
// so each rank keeps a reserve and gives it to the allocator when a small result does not fit.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace sparkhvd {

/// From this size on every rank first reports whether it has memory for its result. Such a message takes little time
/// beside the time for the bytes.
inline constexpr std::size_t kLargeResult = 8 << 20;

/// A reserved range of addresses without pages. A rank that could not reserve it again reports this with its
/// submissions (Descriptor::lacks_memory). Every rank then reports its memory before small results too.
class SpareMemory {
 public:
  SpareMemory() noexcept { restore(); }
  SpareMemory(const SpareMemory&) = delete;
  ~SpareMemory() { give(); }

  /// Reserves the range unless it is reserved. False if this fails.
  bool restore() noexcept {
    if (memory_ == MAP_FAILED) {
      memory_ = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    return memory_ != MAP_FAILED;
  }
  /// Frees the range, so that the allocator can use its addresses.
  void give() noexcept {
    if (memory_ != MAP_FAILED) ::munmap(memory_, kBytes);
    memory_ = MAP_FAILED;
  }

 private:
  static constexpr std::size_t kBytes = kLargeResult + (64 << 10);  // 64 KiB for the allocator

  void* memory_ = MAP_FAILED;
};

}  // namespace sparkhvd
