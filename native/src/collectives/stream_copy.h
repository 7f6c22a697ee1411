// Copies to memory that is not read again soon.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace sparkhvd {

/// Copies like memcpy, but past the cache: it does not fetch the old contents of the target, and evicts no other data.
/// This is faster for large targets that have not just been read.
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    for (std::size_t part = 0; part < kLine; part += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + part)));
    }
  }
  std::memcpy(to + at, from + at, bytes - at);
  // Orders these stores before later stores, such as the store of a counter.
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace sparkhvd
