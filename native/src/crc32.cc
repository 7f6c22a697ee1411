#include "crc32.h"

#include <array>
#include <bit>
#include <cstring>

#include "kernels/kernels.h"
#include "sparkhvd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

static_assert(std::endian::native == std::endian::little);

namespace sparkhvd {
namespace crc32_detail {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320U;
constexpr std::size_t kSlices = 8;

using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[n][b] is the contribution of a byte b to the CRC if n bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? kPolynomial : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFFU];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint64_t load(const std::byte* from) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

}  // namespace

std::uint32_t update_portable(std::uint32_t state, const std::byte* data,
                              std::size_t size) noexcept {
  for (; size >= kSlices; data += kSlices, size -= kSlices) {
    const std::uint64_t word = load(data) ^ state;
    state = 0;
    for (std::size_t i = 0; i < kSlices; ++i) {
      state ^= kTables[kSlices - 1 - i][(word >> (8 * i)) & 0xFFU];
    }
  }
  for (; size > 0; ++data, --size) {
    state = (state >> 8) ^ kTables[0][(state ^ static_cast<std::uint32_t>(*data)) & 0xFFU];
  }
  return state;
}

#if defined(__x86_64__)

namespace {

// x^power modulo the polynomial, with reversed bits. It is shifted left by a bit, because the product of two reversed
// numbers is a bit lower than the reversed product.
constexpr long long fold_factor(unsigned power) {
  std::uint32_t remainder = 0x80000000U;
  for (unsigned i = 0; i < power; ++i) {
    remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? kPolynomial : 0U);
  }
  return static_cast<long long>(remainder) << 1;
}

constexpr std::size_t kLanes = 4;

// Both functions below keep four registers, which hold one step of the message. At every step they multiply each 128
// bits by x^(bits of a step) modulo the polynomial, and add (xor) the next bytes. At the end the registers hold a
// message of one step with the same remainder as the whole message.

constexpr std::size_t kSmall = 16;  // bytes of a register
constexpr std::size_t kSmallStep = kLanes * kSmall;

__m128i load128(const std::byte* from) noexcept {
  return _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from));
}

[[gnu::target("pclmul,sse4.1")]] __m128i fold(__m128i x, __m128i factors,
                                              const std::byte* next) noexcept {
  const __m128i low = _mm_clmulepi64_si128(x, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(x, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), load128(next));
}

[[gnu::target("pclmul,sse4.1")]] std::uint32_t update_pclmul(std::uint32_t state,
                                                             const std::byte* data,
                                                             std::size_t size) noexcept {
  if (size < 2 * kSmallStep) return update_portable(state, data, size);
  const __m128i factors =
      _mm_set_epi64x(fold_factor(8 * kSmallStep - 32), fold_factor(8 * kSmallStep + 32));
  __m128i a = _mm_xor_si128(load128(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load128(data + kSmall);
  __m128i c = load128(data + 2 * kSmall);
  __m128i d = load128(data + 3 * kSmall);
  for (data += kSmallStep, size -= kSmallStep; size >= kSmallStep;
       data += kSmallStep, size -= kSmallStep) {
    a = fold(a, factors, data);
    b = fold(b, factors, data + kSmall);
    c = fold(c, factors, data + 2 * kSmall);
    d = fold(d, factors, data + 3 * kSmall);
  }
  const __m128i left[kLanes] = {a, b, c, d};
  state = update_portable(0, reinterpret_cast<const std::byte*>(left), sizeof(left));
  return update_portable(state, data, size);
}

constexpr std::size_t kWide = 64;
constexpr std::size_t kWideStep = kLanes * kWide;

[[gnu::target("avx512f,vpclmulqdq")]] __m512i fold(__m512i x, __m512i factors,
                                                   const std::byte* next) noexcept {
  const __m512i low = _mm512_clmulepi64_epi128(x, factors, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(x, factors, 0x11);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(next), kXorOfThree);
}

[[gnu::target("avx512f,vpclmulqdq")]] std::uint32_t update_avx512(std::uint32_t state,
                                                                  const std::byte* data,
                                                                  std::size_t size) noexcept {
  if (size < 2 * kWideStep) return update_pclmul(state, data, size);
  const __m512i factors =
      _mm512_set4_epi64(fold_factor(8 * kWideStep - 32), fold_factor(8 * kWideStep + 32),
                        fold_factor(8 * kWideStep - 32), fold_factor(8 * kWideStep + 32));
  const __m512i before = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), before);
  __m512i b = _mm512_loadu_si512(data + kWide);
  __m512i c = _mm512_loadu_si512(data + 2 * kWide);
  __m512i d = _mm512_loadu_si512(data + 3 * kWide);
  for (data += kWideStep, size -= kWideStep; size >= kWideStep;
       data += kWideStep, size -= kWideStep) {
    a = fold(a, factors, data);
    b = fold(b, factors, data + kWide);
    c = fold(c, factors, data + 2 * kWide);
    d = fold(d, factors, data + 3 * kWide);
  }
  const __m512i left[kLanes] = {a, b, c, d};
  state = update_pclmul(0, reinterpret_cast<const std::byte*>(left), sizeof(left));
  return update_pclmul(state, data, size);
}

bool has_pclmul() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kNeeded = bit_PCLMUL | bit_SSE4_1;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kNeeded) == kNeeded;
}

// True if the CPU has these instructions and the operating system saves the wide registers.
bool has_wide_pclmul() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return isa_available(SPARKHVD_ISA_AVX512) &&
         __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_VPCLMULQDQ) != 0;
}

}  // namespace

std::vector<Update> hardware_updates() {
  std::vector<Update> found;
  if (has_pclmul()) found.push_back(update_pclmul);
  if (has_pclmul() && has_wide_pclmul()) found.push_back(update_avx512);
  return found;
}

#elif defined(__aarch64__)

namespace {

// Uses inline assembler, because compilers differ in the attribute for these instructions.
std::uint32_t update_armv8(std::uint32_t state, const std::byte* data, std::size_t size) noexcept {
  for (; size >= sizeof(std::uint64_t);
       data += sizeof(std::uint64_t), size -= sizeof(std::uint64_t)) {
    const std::uint64_t word = load(data);
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(state) : "r"(word));
  }
  for (; size > 0; ++data, --size) {
    const auto byte = static_cast<std::uint32_t>(*data);
    __asm__(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(state) : "r"(byte));
  }
  return state;
}

constexpr unsigned long kHasCrc32 = 1UL << 7;  // HWCAP_CRC32 of <asm/hwcap.h>

}  // namespace

std::vector<Update> hardware_updates() {
  if ((::getauxval(AT_HWCAP) & kHasCrc32) != 0) return {update_armv8};
  return {};
}

#else

std::vector<Update> hardware_updates() { return {}; }

#endif

}  // namespace crc32_detail

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data) noexcept {
  // Queries the CPU once, because in a virtual machine CPUID is slow: the host answers it.
  static const crc32_detail::Update update = [] {
    const auto found = crc32_detail::hardware_updates();
    return found.empty() ? crc32_detail::update_portable : found.back();
  }();
  return ~update(~crc, data.data(), data.size());
}

}  // namespace sparkhvd
