// The kernels that every CPU runs, and the choice between instruction sets.
#include <bit>
#include <stdexcept>

#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// Every x86-64 and aarch64 CPU has vector registers of 16 bytes. On other CPUs the compiler splits the vectors.
#define SPARKHVD_VECTOR_BYTES 16

namespace sparkhvd::kernels_detail {
namespace {

float float_from_bits(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Converts IEEE binary16 to binary32 exactly. A signalling NaN becomes quiet, as in hardware.
float float_from_float16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fU;
  const std::uint32_t fraction = half & 0x3ffU;
  if (exponent == 0) {  // zero or denormal: fraction * 2^-24, exact in float32
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return float_from_bits(bits_of(magnitude) | sign);
  }
  if (exponent == 0x1f) {
    const std::uint32_t quiet = fraction != 0 ? 0x400000U : 0U;
    return float_from_bits(sign | 0x7f800000U | quiet | (fraction << 13));
  }
  return float_from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Converts binary32 to binary16, rounded to nearest even. Values that are too large become infinite; a NaN keeps the
// top bits of its payload.
std::uint16_t float16_from_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  } else if (magnitude >= 0x477ff000U) {  // at least 65520: rounds to infinity
    half = 0x7c00U;
  } else if (magnitude >= 0x38800000U) {  // normal, at least 2^-14
    const std::uint32_t rebased = magnitude - (112U << 23);
    half = (rebased + 0xfffU + ((rebased >> 13) & 1U)) >> 13;
  } else if (magnitude > 0x33000000U) {  // denormal, more than half of the smallest one (2^-25)
    const std::uint32_t fraction = (magnitude & 0x7fffffU) | 0x800000U;
    const std::uint32_t shift = 126U - (magnitude >> 23);  // from 14 to 24
    const std::uint32_t rest = fraction & ((1U << shift) - 1U);
    const std::uint32_t middle = 1U << (shift - 1U);
    half = fraction >> shift;
    if (rest > middle || (rest == middle && (half & 1U) != 0)) ++half;
  }
  return static_cast<std::uint16_t>(sign | half);
}

template <typename Floats>
__attribute__((noinline)) Floats widen_float16(const std::uint16_t* from) {
  Floats wide;
  for (std::size_t lane = 0; lane < sizeof(Floats) / sizeof(float); ++lane) {
    wide[lane] = float_from_float16(from[lane]);
  }
  return wide;
}

template <typename Floats>
__attribute__((noinline)) void narrow_float16(std::uint16_t* to, const Floats& value) {
  for (std::size_t lane = 0; lane < sizeof(Floats) / sizeof(float); ++lane) {
    to[lane] = float16_from_float(value[lane]);
  }
}

}  // namespace
}  // namespace sparkhvd::kernels_detail

#include "kernels/kernels_impl.h"

namespace sparkhvd {
namespace kernels_detail {

const Table* scalar_table() noexcept { return &kTable; }

namespace {

#if defined(__x86_64__)
// The code queries the CPU itself, because __builtin_cpu_supports always returns false in builds with zig.
struct Features {
  bool avx2 = false;
  bool avx512 = false;
};

bool all_set(unsigned word, unsigned bits) noexcept { return (word & bits) == bits; }

Features cpu_features() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return {};
  if (!all_set(ecx, bit_OSXSAVE | bit_AVX | bit_F16C)) return {};
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {};
  const unsigned sets = ebx;
  // The registers that the operating system saves when it switches threads.
  unsigned saved = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
  constexpr unsigned kYmm = 0x6;           // and xmm
  constexpr unsigned kZmm = kYmm | 0xe0U;  // and mask registers
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  return {.avx2 = all_set(saved, kYmm) && all_set(sets, bit_AVX2),
          .avx512 = all_set(saved, kZmm) && all_set(sets, bit_AVX2 | kAvx512)};
}

// Queries the CPU once, because in a virtual machine the host answers CPUID, which takes microseconds.
const Features& features() noexcept {
  static const Features found = cpu_features();
  return found;
}

bool cpu_has_avx2() noexcept { return features().avx2; }
bool cpu_has_avx512() noexcept { return features().avx512; }
#else
bool cpu_has_avx2() noexcept { return false; }
bool cpu_has_avx512() noexcept { return false; }
#endif

const Table* table_of(int isa) noexcept {
  switch (isa) {
    case SPARKHVD_ISA_AUTO:
      if (const Table* table = table_of(SPARKHVD_ISA_AVX512)) return table;
      if (const Table* table = table_of(SPARKHVD_ISA_AVX2)) return table;
      if (const Table* table = table_of(SPARKHVD_ISA_NEON)) return table;
      return scalar_table();
    case SPARKHVD_ISA_SCALAR:
      return scalar_table();
    case SPARKHVD_ISA_AVX2:
      return cpu_has_avx2() ? avx2_table() : nullptr;
    case SPARKHVD_ISA_AVX512:
      return cpu_has_avx512() ? avx512_table() : nullptr;
    case SPARKHVD_ISA_NEON:
      return neon_table();  // every CPU that runs an aarch64 build has it
    default:
      return nullptr;
  }
}

struct Operands {
  DType dtype;
  ReduceOp op;
};

Operation operation_of(const Operands& what) {
  switch (what.op) {
    case ReduceOp::kAverage:
      if (what.dtype == DType::kBool) throw std::invalid_argument("bool has no Average");
      return kOpSum;
    case ReduceOp::kSum:
      return kOpSum;
    case ReduceOp::kMin:
      return kOpMin;
    case ReduceOp::kMax:
      return kOpMax;
    case ReduceOp::kProduct:
      return kOpProduct;
    case ReduceOp::kBitAnd:
      return kOpAnd;
    case ReduceOp::kBitOr:
      return kOpOr;
    case ReduceOp::kBitXor:
      return kOpXor;
    case ReduceOp::kAdasum:
      break;
  }
  throw std::invalid_argument("this operation is not an elementwise reduction");
}

void run(const Table& table, Form form, const Operands& what, const Buffers& buffers,
         const Factors& factors) {
  if (buffers.num_srcs == 0) throw std::invalid_argument("a reduction needs at least one source");
  const auto dtype = static_cast<std::size_t>(what.dtype);
  const ReduceFunction function = table.functions[form][dtype][operation_of(what)];
  if (function == nullptr)
    throw std::invalid_argument("floating-point types do not have this reduction");
  function(buffers, factors);
}

Factors factors_of(const Scaling& scaling, Form form) {
  Factors factors;
  if (form != kFinish) factors.pre = scaling.prescale;
  if (form != kPartial) {
    // Multiplying by the reciprocal of a power of two is exact, and faster than dividing.
    const bool is_exact = std::has_single_bit(static_cast<unsigned>(scaling.divisor));
    factors.post = is_exact ? scaling.postscale / scaling.divisor : scaling.postscale;
    factors.divisor = is_exact ? 1 : scaling.divisor;
    factors.float_divisor = factors.divisor / factors.post;
  }
  factors.has_pre = factors.pre != 1.0;
  factors.has_post = factors.post != 1.0;
  factors.has_divisor = factors.divisor != 1.0;
  return factors;
}

}  // namespace
}  // namespace kernels_detail

using kernels_detail::factors_of;

void Kernels::reduce(DType dtype, ReduceOp op, void* dst, std::span<const void* const> srcs,
                     std::size_t count, const Scaling& scaling) const {
  kernels_detail::run(*table_, kernels_detail::kReduce, {dtype, op},
                      {dst, nullptr, 0, srcs.data(), srcs.size(), count},
                      factors_of(scaling, kernels_detail::kReduce));
}

void Kernels::reduce_to_all(DType dtype, ReduceOp op, std::span<void* const> dsts,
                            std::span<const void* const> srcs, std::size_t count,
                            const Scaling& scaling) const {
  if (dsts.empty()) throw std::invalid_argument("a reduction needs at least one destination");
  kernels_detail::run(*table_, kernels_detail::kReduce, {dtype, op},
                      {dsts[0], dsts.data() + 1, dsts.size() - 1, srcs.data(), srcs.size(), count},
                      factors_of(scaling, kernels_detail::kReduce));
}

void Kernels::reduce_partial(DType dtype, ReduceOp op, void* accum,
                             std::span<const void* const> srcs, std::size_t count,
                             const Scaling& scaling) const {
  kernels_detail::run(*table_, kernels_detail::kPartial, {dtype, op},
                      {accum, nullptr, 0, srcs.data(), srcs.size(), count},
                      factors_of(scaling, kernels_detail::kPartial));
}

void Kernels::finish(DType dtype, ReduceOp op, void* dst, std::span<const void* const> accums,
                     std::size_t count, const Scaling& scaling) const {
  kernels_detail::run(*table_, kernels_detail::kFinish, {dtype, op},
                      {dst, nullptr, 0, accums.data(), accums.size(), count},
                      factors_of(scaling, kernels_detail::kFinish));
}

bool isa_available(int isa) noexcept { return kernels_detail::table_of(isa) != nullptr; }

const Kernels& kernels(int isa) {
  using kernels_detail::table_of;
  // There is one constant object per table, so that callers can keep a reference to it.
  static const Kernels scalar{*kernels_detail::scalar_table()};
  const kernels_detail::Table* const table = table_of(isa);
  if (table == nullptr) throw std::invalid_argument("this CPU lacks the instruction set");
  if (table == kernels_detail::scalar_table()) return scalar;
  if (table == table_of(SPARKHVD_ISA_AVX2)) {
    static const Kernels avx2{*table};
    return avx2;
  }
  if (table == table_of(SPARKHVD_ISA_AVX512)) {
    static const Kernels avx512{*table};
    return avx512;
  }
  static const Kernels neon{*table};
  return neon;
}

}  // namespace sparkhvd
