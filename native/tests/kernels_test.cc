// The reduce kernels, compared with a reference that computes element by element, and with each other bit by bit.
#include "kernels/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "test.h"

namespace sparkhvd::test::kernels_test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum,     ReduceOp::kMin,
                             ReduceOp::kMax,     ReduceOp::kProduct, ReduceOp::kBitAnd,
                             ReduceOp::kBitOr,   ReduceOp::kBitXor};
constexpr int kIsas[] = {SPARKHVD_ISA_AVX2, SPARKHVD_ISA_AVX512, SPARKHVD_ISA_NEON,
                         SPARKHVD_ISA_AUTO};
// Counts around every vector width, below and above an unrolled step, and 0.
constexpr std::size_t kCounts[] = {0,  1,  3,  4,  7,  8,   15,  16,  17,
                                   31, 33, 63, 64, 65, 127, 255, 257, 1031};

// Bit patterns that are special for conversions and comparisons: zeros, infinities, NaN with payloads, signalling NaN,
// denormals, ties of roundings, and the largest finite values.
template <typename Word>
std::vector<Word> corner_patterns(DType dtype) {
  if constexpr (sizeof(Word) == 2) {
    if (dtype == DType::kFloat16) {
      return {0x0000, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x7c01,
              0xfd55, 0x0001, 0x83ff, 0x7bff, 0x0400};
    }
    return {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffaa, 0x0001, 0x807f, 0x7f7f, 0x0080};
  } else if constexpr (sizeof(Word) == 4) {
    return {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffc12345,
            0x00000001, 0x807fffff, 0x7f7fffff, 0x00800000, 0x477fefff, 0x477ff000, 0x33000000,
            0x33000001, 0x38800000, 0x387fffff, 0x3f801000, 0x3f803000, 0x3f808000, 0x3f818000};
  } else {
    return {0x0000000000000000, 0x8000000000000000, 0x7ff0000000000000,
            0xfff0000000000000, 0x7ff8000000000000, 0x7ff0000000000001,
            0xfff8000012345678, 0x0000000000000001, 0x7fefffffffffffff};
  }
}

template <typename Word>
void sprinkle(Bytes& bytes, DType dtype, std::mt19937_64& random) {
  const auto corners = corner_patterns<Word>(dtype);
  for (std::size_t at = 0; at + sizeof(Word) <= bytes.size(); at += sizeof(Word)) {
    if (random() % 4 != 0) continue;
    const Word word = corners[random() % corners.size()];
    std::memcpy(&bytes[at], &word, sizeof word);
  }
}

// Uniformly random bits. For floats this gives every exponent, so many sums overflow or cancel.
Bytes random_bytes(DType dtype, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * element_size(dtype));
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBfloat16:
      sprinkle<std::uint16_t>(bytes, dtype, random);
      break;
    case DType::kFloat32:
      sprinkle<std::uint32_t>(bytes, dtype, random);
      break;
    case DType::kFloat64:
      sprinkle<std::uint64_t>(bytes, dtype, random);
      break;
    case DType::kBool:
      for (auto& byte : bytes) byte = static_cast<std::byte>(random() % 2);
      break;
    default:
      break;
  }
  return bytes;
}

std::vector<const void*> pointers_to(const std::vector<Bytes>& buffers) {
  std::vector<const void*> pointers;
  for (const auto& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

std::string describe(DType dtype, ReduceOp op, int isa, std::size_t count) {
  return std::string(name_of(op)) + " of " + std::string(name_of(dtype)) + ", isa " +
         std::to_string(isa) + ", " + std::to_string(count) + " elements";
}

struct Case {
  DType dtype;
  ReduceOp op;
  int isa;
  std::size_t count;
  std::size_t num_srcs;
  Scaling scaling;
};

void compare_with_scalar(const Case& c, std::mt19937_64& random) {
  std::vector<Bytes> srcs;
  for (std::size_t s = 0; s < c.num_srcs; ++s) {
    srcs.push_back(random_bytes(c.dtype, c.count, random));
  }
  const auto pointers = pointers_to(srcs);
  const Kernels& scalar = kernels(SPARKHVD_ISA_SCALAR);
  const Kernels& tested = kernels(c.isa);
  const std::string what = describe(c.dtype, c.op, c.isa, c.count);
  const std::size_t size = c.count * element_size(c.dtype);
  const std::size_t wide = c.count * element_size(accumulation_type(c.dtype));

  Bytes expected(size + 1);
  Bytes found(size + 1);
  scalar.reduce(c.dtype, c.op, expected.data(), pointers, c.count, c.scaling);
  tested.reduce(c.dtype, c.op, found.data(), pointers, c.count, c.scaling);
  CHECK_MESSAGE(expected == found, what);

  Bytes expected_partial(wide + 1);
  Bytes partial(wide + 1);
  scalar.reduce_partial(c.dtype, c.op, expected_partial.data(), pointers, c.count, c.scaling);
  tested.reduce_partial(c.dtype, c.op, partial.data(), pointers, c.count, c.scaling);
  CHECK_MESSAGE(expected_partial == partial, "partial " + what);

  const std::vector<const void*> partials{partial.data(), expected_partial.data(), partial.data()};
  scalar.finish(c.dtype, c.op, expected.data(), partials, c.count, c.scaling);
  tested.finish(c.dtype, c.op, found.data(), partials, c.count, c.scaling);
  CHECK_MESSAGE(expected == found, "finish " + what);

  // The result may overwrite any source.
  for (std::size_t s = 0; s < c.num_srcs; ++s) {
    auto copies = srcs;
    const auto aliased = pointers_to(copies);
    scalar.reduce(c.dtype, c.op, expected.data(), pointers, c.count, c.scaling);
    tested.reduce(c.dtype, c.op, copies[s].data(), aliased, c.count, c.scaling);
    CHECK_MESSAGE(size == 0 || std::memcmp(copies[s].data(), expected.data(), size) == 0,
                  "in place " + what);
  }
}

TEST(instruction_sets_are_those_of_the_architecture) {
#if defined(__aarch64__)
  constexpr bool kIsArm = true;
#else
  constexpr bool kIsArm = false;
#endif
  CHECK(isa_available(SPARKHVD_ISA_SCALAR));
  CHECK(isa_available(SPARKHVD_ISA_NEON) == kIsArm);
  // Linux lists only instruction sets with registers that it saves itself.
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) {
  }
  line += ' ';
  const auto has = [&](std::initializer_list<const char*> flags) {
    return std::ranges::all_of(flags, [&](const char* flag) {
      return line.find(' ' + std::string(flag) + ' ') != std::string::npos;
    });
  };
  CHECK(isa_available(SPARKHVD_ISA_AVX2) == (!kIsArm && has({"avx2", "f16c"})));
  CHECK(isa_available(SPARKHVD_ISA_AVX512) ==
        (!kIsArm && has({"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"})));
}

TEST(kernels_give_the_same_bits_on_every_instruction_set) {
  std::mt19937_64 random(20240917);
  const Scaling scalings[] = {
      {}, {.divisor = 7}, {.prescale = 0.3, .postscale = 1.7, .divisor = 3}};
  for (const int isa : kIsas) {
    if (!isa_available(isa)) continue;
    for (std::int32_t d = 0; d < kNumDTypes; ++d) {
      for (const ReduceOp op : kOps) {
        const auto dtype = static_cast<DType>(d);
        if (dtype == DType::kBool && op == ReduceOp::kAverage) continue;
        if (is_float(dtype) && is_of_bits(op)) continue;
        for (const std::size_t count : kCounts) {
          for (const std::size_t num_srcs : {1U, 2U, 3U, 5U}) {
            for (const Scaling& scaling : scalings) {
              compare_with_scalar({dtype, op, isa, count, num_srcs, scaling}, random);
            }
          }
        }
      }
    }
  }
}

template <typename T>
std::vector<T> reduce_two(DType dtype, ReduceOp op, std::vector<T> a, std::vector<T> b,
                          const Scaling& scaling = {}) {
  std::vector<T> result(a.size());
  const void* const srcs[] = {a.data(), b.data()};
  kernels(SPARKHVD_ISA_AUTO).reduce(dtype, op, result.data(), srcs, a.size(), scaling);
  return result;
}

TEST(float32_operations_match_plain_arithmetic) {
  const std::vector<float> a{1.5F, -2.0F, 1e30F, 3.0F};
  const std::vector<float> b{2.25F, 7.0F, 1e30F, -3.0F};
  using V = std::vector<float>;
  CHECK(reduce_two(DType::kFloat32, ReduceOp::kSum, a, b) == (V{3.75F, 5.0F, 2e30F, 0.0F}));
  CHECK(reduce_two(DType::kFloat32, ReduceOp::kMin, a, b) == (V{1.5F, -2.0F, 1e30F, -3.0F}));
  CHECK(reduce_two(DType::kFloat32, ReduceOp::kMax, a, b) == (V{2.25F, 7.0F, 1e30F, 3.0F}));
  CHECK(reduce_two(DType::kFloat32, ReduceOp::kProduct, a, b) ==
        (V{3.375F, -14.0F, INFINITY, -9.0F}));
  CHECK(reduce_two(DType::kFloat32, ReduceOp::kAverage, a, b, {.divisor = 2}) ==
        (V{1.875F, 2.5F, 1e30F, 0.0F}));
}

// Sums in the order of the sources, in the accumulation type T, divided once.
template <class T>
std::vector<T> averages(DType dtype, const std::vector<Bytes>& srcs, std::size_t count) {
  std::vector<T> result(count);
  std::vector<T> values(count);
  for (std::size_t s = 0; s < srcs.size(); ++s) {
    const void* const source[] = {srcs[s].data()};
    kernels(SPARKHVD_ISA_SCALAR)
        .reduce_partial(dtype, ReduceOp::kSum, values.data(), source, count, {});
    for (std::size_t i = 0; i < count; ++i) {
      if constexpr (std::is_integral_v<T>) {
        using Unsigned = std::make_unsigned_t<T>;
        values[i] = static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(result[i]) +
                                                         static_cast<Unsigned>(values[i])));
        result[i] = values[i];
      } else {
        result[i] = s == 0 ? values[i] : result[i] + values[i];
      }
    }
  }
  if (srcs.size() == 1 && std::is_integral_v<T>) return result;
  const auto divisor = static_cast<double>(srcs.size());
  for (T& number : result) {
    if constexpr (std::is_integral_v<T>) {
      number = static_cast<T>(static_cast<double>(number) / divisor);
    } else {
      number = std::isnan(number) ? std::numeric_limits<T>::quiet_NaN()
                                  : static_cast<T>(number / static_cast<T>(divisor));
    }
  }
  return result;
}

Bytes expected_average(DType dtype, const std::vector<Bytes>& srcs, std::size_t count) {
  Bytes bytes(count * element_size(dtype));
  const auto narrowed = [&](const auto& wide) {
    const void* const source[] = {wide.data()};
    kernels(SPARKHVD_ISA_SCALAR).finish(dtype, ReduceOp::kSum, bytes.data(), source, count, {});
  };
  switch (dtype) {
    case DType::kInt16:
      narrowed(averages<std::int16_t>(dtype, srcs, count));
      break;
    case DType::kUint64:
      narrowed(averages<std::uint64_t>(dtype, srcs, count));
      break;
    case DType::kInt64:
      narrowed(averages<std::int64_t>(dtype, srcs, count));
      break;
    case DType::kFloat64:
      narrowed(averages<double>(dtype, srcs, count));
      break;
    default:
      narrowed(averages<float>(dtype, srcs, count));
      break;
  }
  return bytes;
}

TEST(an_average_is_the_sum_divided_and_rounded_once) {
  std::mt19937_64 random(20250131);
  for (const DType dtype : {DType::kInt16, DType::kInt64, DType::kUint64, DType::kFloat16,
                            DType::kBfloat16, DType::kFloat32, DType::kFloat64}) {
    for (int size = 1; size <= 9; ++size) {
      for (const std::size_t count : kCounts) {
        std::vector<Bytes> srcs;
        for (int s = 0; s < size; ++s) srcs.push_back(random_bytes(dtype, count, random));
        const auto pointers = pointers_to(srcs);
        const Bytes expected = expected_average(dtype, srcs, count);
        const Scaling scaling{.divisor = size};
        for (const int isa :
             {SPARKHVD_ISA_SCALAR, SPARKHVD_ISA_AVX2, SPARKHVD_ISA_AVX512, SPARKHVD_ISA_NEON}) {
          if (!isa_available(isa)) continue;
          const std::string what = describe(dtype, ReduceOp::kAverage, isa, count) + ", " +
                                   std::to_string(size) + " sources";
          Bytes found(expected.size());
          kernels(isa).reduce(dtype, ReduceOp::kAverage, found.data(), pointers, count, scaling);
          CHECK_MESSAGE(found == expected, what);
          // Reduces in two halves, as between hosts.
          Bytes sums(count * element_size(accumulation_type(dtype)));
          kernels(isa).reduce_partial(dtype, ReduceOp::kAverage, sums.data(), pointers, count,
                                      scaling);
          const void* const partial[] = {sums.data()};
          kernels(isa).finish(dtype, ReduceOp::kAverage, found.data(), partial, count, scaling);
          CHECK_MESSAGE(found == expected, "finish " + what);
        }
      }
    }
  }
}

TEST(an_average_with_a_postscale_is_divided_once) {
  const std::vector<float> a{0.1F, 1e38F, 7.0F};
  const std::vector<float> b{0.3F, 2e38F, 3.0F};
  const auto average = [&](double postscale, int divisor) {
    return reduce_two(DType::kFloat32, ReduceOp::kAverage, a, b,
                      {.postscale = postscale, .divisor = divisor});
  };
  const auto divided = [&](float divisor) {
    std::vector<float> result;
    for (std::size_t i = 0; i < a.size(); ++i) result.push_back((a[i] + b[i]) / divisor);
    return result;
  };
  CHECK(average(1, 3) == divided(3));
  CHECK(average(3, 3) == divided(1));
  CHECK(average(2, 3) == divided(1.5F));
  CHECK(average(0.1, 7) == divided(70));
  CHECK(average(0, 3) == std::vector<float>(3));
}

TEST(min_and_max_propagate_nan_from_any_source) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
    const auto found = reduce_two<float>(DType::kFloat32, op, {NAN, 1, -NAN}, {1, NAN, -NAN});
    for (const float value : found) CHECK(std::bit_cast<std::uint32_t>(value) == 0x7fc00000U);
  }
}

TEST(equal_zeros_give_the_last_one) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto found = reduce_two<float>(DType::kFloat32, op, {0.0F, -0.0F}, {-0.0F, 0.0F});
    CHECK(std::signbit(found[0]));
    CHECK(!std::signbit(found[1]));
  }
}

template <typename T>
void check_bits(DType dtype) {
  std::mt19937_64 random(7);
  std::vector<T> a;
  std::vector<T> b;
  std::vector<T> expected[3];
  for (std::size_t i = 0; i < 131; ++i) {
    a.push_back(static_cast<T>(random()));
    b.push_back(static_cast<T>(random()));
    expected[0].push_back(static_cast<T>(a[i] & b[i]));
    expected[1].push_back(static_cast<T>(a[i] | b[i]));
    expected[2].push_back(static_cast<T>(a[i] ^ b[i]));
  }
  CHECK(reduce_two(dtype, ReduceOp::kBitAnd, a, b) == expected[0]);
  CHECK(reduce_two(dtype, ReduceOp::kBitOr, a, b) == expected[1]);
  CHECK(reduce_two(dtype, ReduceOp::kBitXor, a, b) == expected[2]);
}

TEST(bits_are_combined_in_integers_of_every_size) {
  check_bits<std::uint8_t>(DType::kUint8);
  check_bits<std::int8_t>(DType::kInt8);
  check_bits<std::uint16_t>(DType::kUint16);
  check_bits<std::int16_t>(DType::kInt16);
  check_bits<std::uint32_t>(DType::kUint32);
  check_bits<std::int32_t>(DType::kInt32);
  check_bits<std::uint64_t>(DType::kUint64);
  check_bits<std::int64_t>(DType::kInt64);
  using V = std::vector<std::uint8_t>;
  const V a{0, 0, 1, 1};
  const V b{0, 1, 0, 1};
  CHECK(reduce_two(DType::kBool, ReduceOp::kBitAnd, a, b) == (V{0, 0, 0, 1}));
  CHECK(reduce_two(DType::kBool, ReduceOp::kBitOr, a, b) == (V{0, 1, 1, 1}));
  CHECK(reduce_two(DType::kBool, ReduceOp::kBitXor, a, b) == (V{0, 1, 1, 0}));
}

TEST(integers_wrap_around_and_averages_truncate) {
  using V = std::vector<std::int32_t>;
  CHECK(reduce_two<std::int32_t>(DType::kInt32, ReduceOp::kSum, {INT32_MAX}, {1}) == V{INT32_MIN});
  CHECK(reduce_two<std::int32_t>(DType::kInt32, ReduceOp::kAverage, {-2, 5}, {-3, 2},
                                 {.divisor = 2}) == (V{-2, 3}));
  // 49 times the double nearest to 1/49 is less than 1.
  CHECK(reduce_two<std::int32_t>(DType::kInt32, ReduceOp::kAverage, {24, -97}, {25, -50},
                                 {.divisor = 49}) == (V{1, -3}));
  CHECK(reduce_two<std::int32_t>(DType::kInt32, ReduceOp::kAverage, {24}, {25},
                                 {.postscale = 3, .divisor = 49}) == V{3});
  // A result out of range saturates instead of being undefined.
  CHECK(reduce_two<std::int32_t>(DType::kInt32, ReduceOp::kSum, {1, -1}, {1, -1},
                                 {.postscale = 1e300}) == (V{INT32_MAX, INT32_MIN}));
  CHECK(reduce_two<std::uint64_t>(DType::kUint64, ReduceOp::kSum, {1, 0}, {1, 0},
                                  {.postscale = 1e300}) ==
        (std::vector<std::uint64_t>{UINT64_MAX, 0}));
}

TEST(bools_are_or_and_and) {
  using V = std::vector<std::uint8_t>;
  const V a{0, 0, 1, 1, 0, 1};
  const V b{0, 1, 0, 1, 2, 2};  // any byte except 0 is true
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    CHECK(reduce_two(DType::kBool, op, a, b) == (V{0, 1, 1, 1, 1, 1}));
  }
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin}) {
    CHECK(reduce_two(DType::kBool, op, a, b) == (V{0, 0, 0, 1, 0, 1}));
  }
}

TEST(halves_add_in_float32_and_round_once) {
  // 2048 + 1 + 1: rounding after every addition would stay at 2048.
  const std::uint16_t big = 0x6800;  // 2048
  const std::uint16_t one = 0x3c00;
  const void* const srcs[] = {&big, &one, &one};
  std::uint16_t result = 0;
  kernels(SPARKHVD_ISA_AUTO).reduce(DType::kFloat16, ReduceOp::kSum, &result, srcs, 1, {});
  CHECK(result == 0x6801);
}

#if defined(__FLT16_MANT_DIG__)
// The compiler's own half type is the reference for both directions.
TEST(float16_conversions_match_the_compiler) {
  std::vector<std::uint16_t> halves(1U << 16);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  const void* const srcs[] = {halves.data()};
  std::vector<float> wide(halves.size());
  std::mt19937_64 random(7);
  std::vector<float> floats(200000);
  for (std::size_t i = 0; i < floats.size(); ++i) {
    // Half of the numbers are in the range of float16, so that all cases of rounding occur.
    const auto bits = static_cast<std::uint32_t>(random());
    floats[i] = i % 2 == 0 ? std::bit_cast<float>(bits)
                           : std::bit_cast<float>((bits & 0x8fffffffU) + 0x30000000U);
  }
  const void* const float_srcs[] = {floats.data()};
  std::vector<std::uint16_t> narrow(floats.size());
  for (const int isa :
       {SPARKHVD_ISA_SCALAR, SPARKHVD_ISA_AVX2, SPARKHVD_ISA_AVX512, SPARKHVD_ISA_NEON}) {
    if (!isa_available(isa)) continue;
    kernels(isa).reduce_partial(DType::kFloat16, ReduceOp::kSum, wide.data(), srcs, halves.size(),
                                {});
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const auto expected = static_cast<float>(std::bit_cast<_Float16>(halves[i]));
      CHECK(std::isnan(expected)
                ? std::isnan(wide[i])
                : std::bit_cast<std::uint32_t>(expected) == std::bit_cast<std::uint32_t>(wide[i]));
    }
    kernels(isa).finish(DType::kFloat16, ReduceOp::kSum, narrow.data(), float_srcs, floats.size(),
                        {});
    for (std::size_t i = 0; i < floats.size(); ++i) {
      const auto expected = std::bit_cast<std::uint16_t>(static_cast<_Float16>(floats[i]));
      CHECK(std::isnan(floats[i]) ? narrow[i] == 0x7e00 : narrow[i] == expected);
    }
  }
}
#endif

TEST(bfloat16_rounds_to_nearest_even) {
  const std::vector<std::uint32_t> bits{0x3f808000, 0x3f818000, 0x3f808001, 0x7f7fffff,
                                        0x7f800001, 0xff800000, 0x00000001, 0x80018000};
  const std::vector<std::uint16_t> expected{0x3f80, 0x3f82, 0x3f81, 0x7f80,
                                            0x7fc0, 0xff80, 0x0000, 0x8002};
  std::vector<std::uint16_t> found(bits.size());
  const void* const srcs[] = {bits.data()};
  kernels(SPARKHVD_ISA_AUTO)
      .finish(DType::kBfloat16, ReduceOp::kSum, found.data(), srcs, bits.size(), {});
  CHECK(found == expected);
}

}  // namespace
}  // namespace sparkhvd::test::kernels_test
