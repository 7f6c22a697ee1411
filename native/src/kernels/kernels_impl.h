// The loops of every instruction set, written once with the compiler's vector types.
//
// scalar.cc, avx2.cc, avx512.cc and neon.cc include this file, and each is compiled with other flags. Two rules follow:
//   - Everything here has internal linkage, and nothing here calls an inline function of the standard library. The
//     linker keeps only one copy of an inline function: it could keep the copy for AVX-512, which would then run on
//     every CPU.
//   - A file defines SPARKHVD_VECTOR_BYTES and the two float16 conversions before it includes this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace sparkhvd::kernels_detail {
namespace {

#define SPARKHVD_INLINE __attribute__((always_inline)) inline

// 16-bit floats are accumulated as float32, so a step handles as many 16-bit floats as a vector has float32 elements.
template <typename T>
struct VectorOf {
  typedef T type
      __attribute__((vector_size(SPARKHVD_VECTOR_BYTES)));  // NOLINT: no `using` form in GCC 11
};
template <typename T>
using Vector = typename VectorOf<T>::type;

constexpr std::size_t kFloatLanes = SPARKHVD_VECTOR_BYTES / sizeof(float);
typedef std::uint16_t HalfVector __attribute__((vector_size(SPARKHVD_VECTOR_BYTES / 2)));  // NOLINT

template <typename T>
struct UnsignedOf {
  using type = T;
};
template <>
struct UnsignedOf<std::int8_t> {
  using type = std::uint8_t;
};
template <>
struct UnsignedOf<std::int16_t> {
  using type = std::uint16_t;
};
template <>
struct UnsignedOf<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct UnsignedOf<std::int64_t> {
  using type = std::uint64_t;
};
template <typename T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;
template <>
constexpr bool kIsFloat<double> = true;

template <typename V>
SPARKHVD_INLINE V load_vector(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename V>
SPARKHVD_INLINE void store_vector(void* to, const V& value) {
  std::memcpy(to, &value, sizeof value);
}

// A storage type converts its elements to a vector of the accumulation type and back.
template <typename T>
struct Plain {
  using Element = T;
  using Accum = T;
  static constexpr bool kScales = true;
  static SPARKHVD_INLINE Vector<T> load(const T* from) { return load_vector<Vector<T>>(from); }
  static SPARKHVD_INLINE void store(T* to, Vector<T> value) { store_vector(to, value); }
};

struct Bool {
  using Element = std::uint8_t;
  using Accum = std::uint8_t;
  static constexpr bool kScales = false;
  static SPARKHVD_INLINE Vector<std::uint8_t> load(const std::uint8_t* from) {
    const auto value = load_vector<Vector<std::uint8_t>>(from);
    return reinterpret_cast<Vector<std::uint8_t>>(value != 0) & 1;
  }
  static SPARKHVD_INLINE void store(std::uint8_t* to, Vector<std::uint8_t> value) {
    store_vector(to, value);
  }
};

struct Float16 {
  using Element = std::uint16_t;
  using Accum = float;
  static constexpr bool kScales = true;
  static SPARKHVD_INLINE Vector<float> load(const std::uint16_t* from) {
    return widen_float16<Vector<float>>(from);
  }
  static SPARKHVD_INLINE void store(std::uint16_t* to, Vector<float> value) {
    narrow_float16(to, value);
  }
};

struct Bfloat16 {
  using Element = std::uint16_t;
  using Accum = float;
  static constexpr bool kScales = true;
  static SPARKHVD_INLINE Vector<float> load(const std::uint16_t* from) {
    const auto wide = __builtin_convertvector(load_vector<HalfVector>(from), Vector<std::uint32_t>);
    return reinterpret_cast<Vector<float>>(wide << 16);
  }
  // Rounds to nearest even. The only possible NaN is the canonical NaN: adding to it does not overflow into other bits.
  static SPARKHVD_INLINE void store(std::uint16_t* to, Vector<float> value) {
    const auto bits = reinterpret_cast<Vector<std::uint32_t>>(value);
    const auto rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    store_vector(to, __builtin_convertvector(rounded, HalfVector));
  }
};

template <typename T, Operation kOp>
SPARKHVD_INLINE Vector<T> combine(Vector<T> a, Vector<T> b) {
  using Unsigned = Vector<typename UnsignedOf<T>::type>;  // wraps without undefined behaviour
  if constexpr (kOp == kOpSum) {
    return reinterpret_cast<Vector<T>>(reinterpret_cast<Unsigned>(a) +
                                       reinterpret_cast<Unsigned>(b));
  } else if constexpr (kOp == kOpProduct) {
    return reinterpret_cast<Vector<T>>(reinterpret_cast<Unsigned>(a) *
                                       reinterpret_cast<Unsigned>(b));
  } else if constexpr (kOp == kOpAnd) {
    return a & b;
  } else if constexpr (kOp == kOpOr) {
    return a | b;
  } else if constexpr (kOp == kOpXor) {
    return a ^ b;
  } else {
    auto keep = kOp == kOpMin ? a < b : a > b;
    if constexpr (kIsFloat<T>) keep |= a != a;  // keeps a NaN in a; a NaN in b fails the comparison
    return keep ? a : b;
  }
}

template <Operation kOp>
SPARKHVD_INLINE Vector<std::uint8_t> combine_bool(Vector<std::uint8_t> a, Vector<std::uint8_t> b) {
  if constexpr (kOp == kOpXor) return a ^ b;
  return kOp == kOpSum || kOp == kOpMax || kOp == kOpOr ? (a | b) : (a & b);
}

// Converts a double to an integer: truncated and saturated; NaN gives 0. The bounds are compared as doubles. As a
// double the largest 64-bit value is a power of two that is itself out of range.
template <typename T>
SPARKHVD_INLINE T saturate(double value) {
  constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);
  constexpr int kBits = 8 * static_cast<int>(sizeof(T)) - (kSigned ? 1 : 0);
  constexpr T kHighest = static_cast<T>(static_cast<std::uint64_t>(-1) >> (64 - kBits));
  constexpr T kLowest = kSigned ? static_cast<T>(-kHighest - 1) : static_cast<T>(0);
  constexpr double kTooHigh = 2.0 * static_cast<double>(std::uint64_t{1} << (kBits - 1));
  if (value >= kTooHigh) return kHighest;
  if (value <= static_cast<double>(kLowest)) return kLowest;
  return value == value ? static_cast<T>(value) : static_cast<T>(0);
}

// It works element by element and is rare (Average of integers). Inlined, it would be most of the library's code.
template <typename T>
__attribute__((noinline)) void scale_integers(Vector<T>& values, double factor, double divisor) {
  for (std::size_t lane = 0; lane < SPARKHVD_VECTOR_BYTES / sizeof(T); ++lane) {
    values[lane] = saturate<T>(static_cast<double>(values[lane]) * factor / divisor);
  }
}

template <typename T>
SPARKHVD_INLINE Vector<T> scale_input(Vector<T> value, const Factors& f) {
  if (!f.has_pre) return value;
  if constexpr (kIsFloat<T>) {
    return value * static_cast<T>(f.pre);
  } else {
    scale_integers<T>(value, f.pre, 1);
    return value;
  }
}

template <typename T>
SPARKHVD_INLINE Vector<T> scale_result(Vector<T> value, const Factors& f) {
  if constexpr (kIsFloat<T>) {
    if (f.has_divisor) return value / static_cast<T>(f.float_divisor);
    if (f.has_post) return value * static_cast<T>(f.post);
  } else if (f.has_divisor || f.has_post) {
    scale_integers<T>(value, f.post, f.divisor);
  }
  return value;
}

template <typename T>
SPARKHVD_INLINE Vector<T> canonical(Vector<T> value) {
  if constexpr (kIsFloat<T>) {
    const Vector<T> nan = Vector<T>{} + static_cast<T>(__builtin_nan(""));
    return value == value ? value : nan;
  } else {
    return value;
  }
}

template <typename From, typename To, Operation kOp>
struct Loop {
  using Accum = typename From::Accum;
  using In = typename From::Element;
  using Out = typename To::Element;
  static constexpr std::size_t kLanes = SPARKHVD_VECTOR_BYTES / sizeof(Accum);
  // Number of independent vectors per step: enough to hide the latency of a chain of additions.
  static constexpr std::size_t kUnroll = 4;

  static SPARKHVD_INLINE Vector<Accum> load(const void* src, std::size_t at, const Factors& f) {
    Vector<Accum> value = From::load(static_cast<const In*>(src) + at);
    if constexpr (From::kScales) value = scale_input<Accum>(value, f);
    return value;
  }

  static SPARKHVD_INLINE Vector<Accum> join(Vector<Accum> a, Vector<Accum> b) {
    if constexpr (From::kScales) {
      return combine<Accum, kOp>(a, b);
    } else {
      return combine_bool<kOp>(a, b);
    }
  }

  static SPARKHVD_INLINE Vector<Accum> finish(Vector<Accum> value, const Factors& f) {
    if constexpr (From::kScales) value = scale_result<Accum>(value, f);
    return canonical<Accum>(value);
  }

  template <std::size_t kVectors>
  static SPARKHVD_INLINE void step(Out* dst, const Buffers& b, std::size_t num_srcs, std::size_t at,
                                   const Factors& f) {
    Vector<Accum> sums[kVectors];
    for (std::size_t k = 0; k < kVectors; ++k) sums[k] = load(b.srcs[0], at + k * kLanes, f);
    for (std::size_t s = 1; s < num_srcs; ++s) {
      const void* const src = b.srcs[s];
      for (std::size_t k = 0; k < kVectors; ++k) {
        sums[k] = join(sums[k], load(src, at + k * kLanes, f));
      }
    }
    for (std::size_t k = 0; k < kVectors; ++k) sums[k] = finish(sums[k], f);
    for (std::size_t k = 0; k < kVectors; ++k) To::store(dst + at + k * kLanes, sums[k]);
    for (std::size_t c = 0; c < b.num_copies; ++c) {
      Out* const copy = static_cast<Out*>(b.copies[c]);
      for (std::size_t k = 0; k < kVectors; ++k) To::store(copy + at + k * kLanes, sums[k]);
    }
  }

  // Reduces the elements after the last whole vector, in a padded vector.
  static void tail(Out* dst, const Buffers& b, std::size_t at, const Factors& f) {
    const std::size_t rest = b.count - at;
    Vector<Accum> sum{};
    for (std::size_t s = 0; s < b.num_srcs; ++s) {
      In padded[kLanes] = {};
      std::memcpy(padded, static_cast<const In*>(b.srcs[s]) + at, rest * sizeof(In));
      const Vector<Accum> value = load(padded, 0, f);
      sum = s == 0 ? value : join(sum, value);
    }
    Out padded[kLanes];
    To::store(padded, finish(sum, f));
    std::memcpy(dst + at, padded, rest * sizeof(Out));
    for (std::size_t c = 0; c < b.num_copies; ++c) {
      std::memcpy(static_cast<Out*>(b.copies[c]) + at, padded, rest * sizeof(Out));
    }
  }

  template <std::size_t kNumSrcs>  // 0: any number
  static SPARKHVD_INLINE std::size_t body(Out* dst, const Buffers& b, const Factors& f) {
    const std::size_t num_srcs = kNumSrcs == 0 ? b.num_srcs : kNumSrcs;
    std::size_t at = 0;
    for (; at + kUnroll * kLanes <= b.count; at += kUnroll * kLanes) {
      step<kUnroll>(dst, b, num_srcs, at, f);
    }
    for (; at + kLanes <= b.count; at += kLanes) step<1>(dst, b, num_srcs, at, f);
    return at;
  }

  static void run(const Buffers& b, const Factors& f) {
    auto* const dst = static_cast<Out*>(b.dst);
    // Sums of two ranks on a host are the common case. With a count known at compile time both pointers stay in
    // registers.
    const bool is_common = kOp == kOpSum && b.num_srcs == 2;
    const std::size_t at = is_common ? body<2>(dst, b, f) : body<0>(dst, b, f);
    if (at < b.count) tail(dst, b, at, f);
  }
};

template <typename From, typename To>
constexpr void fill(ReduceFunction (&row)[kNumOperations]) {
  row[kOpSum] = &Loop<From, To, kOpSum>::run;
  row[kOpMin] = &Loop<From, To, kOpMin>::run;
  row[kOpMax] = &Loop<From, To, kOpMax>::run;
  row[kOpProduct] = &Loop<From, To, kOpProduct>::run;
}

// Bit operations do not depend on the sign, so both types of a size use the same functions.
template <typename Storage>
constexpr void fill_bits(Table& table, DType dtype, DType other) {
  for (auto& form : table.functions) {
    for (const DType each : {dtype, other}) {
      auto& row = form[static_cast<std::size_t>(each)];
      row[kOpAnd] = &Loop<Storage, Storage, kOpAnd>::run;
      row[kOpOr] = &Loop<Storage, Storage, kOpOr>::run;
      row[kOpXor] = &Loop<Storage, Storage, kOpXor>::run;
    }
  }
}

template <typename Storage>
constexpr void fill_all(Table& table, DType dtype) {
  using Wide = Plain<typename Storage::Accum>;
  const auto index = static_cast<std::size_t>(dtype);
  fill<Storage, Storage>(table.functions[kReduce][index]);
  if constexpr (sizeof(typename Storage::Accum) == sizeof(typename Storage::Element)) {
    fill<Storage, Storage>(table.functions[kPartial][index]);
    fill<Storage, Storage>(table.functions[kFinish][index]);
  } else {
    fill<Storage, Wide>(table.functions[kPartial][index]);
    fill<Wide, Storage>(table.functions[kFinish][index]);
  }
}

constexpr Table make_table() {
  Table table{};
  fill_all<Plain<std::uint8_t>>(table, DType::kUint8);
  fill_all<Plain<std::int8_t>>(table, DType::kInt8);
  fill_all<Plain<std::uint16_t>>(table, DType::kUint16);
  fill_all<Plain<std::int16_t>>(table, DType::kInt16);
  fill_all<Plain<std::uint32_t>>(table, DType::kUint32);
  fill_all<Plain<std::int32_t>>(table, DType::kInt32);
  fill_all<Plain<std::uint64_t>>(table, DType::kUint64);
  fill_all<Plain<std::int64_t>>(table, DType::kInt64);
  fill_all<Float16>(table, DType::kFloat16);
  fill_all<Bfloat16>(table, DType::kBfloat16);
  fill_all<Plain<float>>(table, DType::kFloat32);
  fill_all<Plain<double>>(table, DType::kFloat64);
  fill_all<Bool>(table, DType::kBool);
  fill_bits<Plain<std::uint8_t>>(table, DType::kUint8, DType::kInt8);
  fill_bits<Plain<std::uint16_t>>(table, DType::kUint16, DType::kInt16);
  fill_bits<Plain<std::uint32_t>>(table, DType::kUint32, DType::kInt32);
  fill_bits<Plain<std::uint64_t>>(table, DType::kUint64, DType::kInt64);
  fill_bits<Bool>(table, DType::kBool, DType::kBool);
  return table;
}

constexpr Table kTable = make_table();

#undef SPARKHVD_INLINE

}  // namespace
}  // namespace sparkhvd::kernels_detail
