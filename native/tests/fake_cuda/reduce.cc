#include "reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fake {

using sparkhvd::nccl::NcclDataType;
using sparkhvd::nccl::NcclOp;

namespace {

struct Bfloat16 {
  std::uint16_t bits;

  static float widen(Bfloat16 value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
  }
  static Bfloat16 narrow(float value) {
    auto bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return {0x7fc0};
    bits += 0x7fff + ((bits >> 16) & 1);  // rounds to nearest, ties to even
    return {static_cast<std::uint16_t>(bits >> 16)};
  }
};

struct Float16 {
  std::uint16_t bits;

  static float widen(Float16 value) {
    const std::uint32_t exponent = (value.bits >> 10) & 31;
    const auto mantissa = static_cast<float>(value.bits & 1023);
    float result = 0;
    if (exponent == 31) {
      result = mantissa == 0 ? std::numeric_limits<float>::infinity()
                             : std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
      result = std::ldexp(mantissa, -24);
    } else {
      result = std::ldexp(mantissa + 1024, static_cast<int>(exponent) - 25);
    }
    return (value.bits & 0x8000) != 0 ? -result : result;
  }
  static Float16 narrow(float value) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const float size = std::fabs(value);
    if (std::isnan(value)) return {static_cast<std::uint16_t>(sign | 0x7e00)};
    if (size >= 65520) return {static_cast<std::uint16_t>(sign | 0x7c00)};
    // The unit in the last place; nearbyint rounds ties to even, and a carry moves the exponent up.
    const int exponent = size < std::ldexp(1.F, -14) ? -14 : std::ilogb(size);
    const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return {static_cast<std::uint16_t>(sign + (static_cast<std::uint32_t>(exponent + 14) << 10) +
                                       units)};
  }
};

template <class T>
constexpr bool kIsHalf = std::same_as<T, Float16> || std::same_as<T, Bfloat16>;

template <class A>
A combine(A left, A right, NcclOp op) {
  switch (op) {
    case NcclOp::kSum:
    case NcclOp::kProduct: {
      const bool is_sum = op == NcclOp::kSum;
      if constexpr (std::is_integral_v<A>) {
        // The type is unsigned and has at least 32 bits, so that an overflow wraps, as on a GPU.
        using Wide = std::common_type_t<std::make_unsigned_t<A>, std::uint32_t>;
        const auto a = static_cast<Wide>(left);
        const auto b = static_cast<Wide>(right);
        return static_cast<A>(is_sum ? a + b : a * b);
      } else {
        return is_sum ? left + right : left * right;
      }
    }
    case NcclOp::kMax:
      return std::max(left, right);
    case NcclOp::kMin:
      return std::min(left, right);
  }
  return left;
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void reduce_as(std::span<std::byte> out, std::span<const std::byte* const> inputs, NcclOp op) {
  for (std::size_t at = 0; at + sizeof(T) <= out.size(); at += sizeof(T)) {
    T result;
    if constexpr (kIsHalf<T>) {
      float total = T::widen(load<T>(inputs[0] + at));
      for (const std::byte* input : inputs.subspan(1)) {
        total = combine(total, T::widen(load<T>(input + at)), op);
      }
      result = T::narrow(total);
    } else {
      result = load<T>(inputs[0] + at);
      for (const std::byte* input : inputs.subspan(1)) {
        result = combine(result, load<T>(input + at), op);
      }
    }
    std::memcpy(out.data() + at, &result, sizeof(T));
  }
}

}  // namespace

std::size_t size_of(NcclDataType dtype) {
  switch (dtype) {
    case NcclDataType::kInt8:
    case NcclDataType::kUint8:
      return 1;
    case NcclDataType::kFloat16:
    case NcclDataType::kBfloat16:
      return 2;
    case NcclDataType::kInt32:
    case NcclDataType::kUint32:
    case NcclDataType::kFloat32:
      return 4;
    case NcclDataType::kInt64:
    case NcclDataType::kUint64:
    case NcclDataType::kFloat64:
      return 8;
  }
  return 0;
}

void reduce(std::span<std::byte> out, std::span<const std::byte* const> inputs, NcclDataType dtype,
            NcclOp op) {
  switch (dtype) {
    case NcclDataType::kInt8:
      return reduce_as<std::int8_t>(out, inputs, op);
    case NcclDataType::kUint8:
      return reduce_as<std::uint8_t>(out, inputs, op);
    case NcclDataType::kInt32:
      return reduce_as<std::int32_t>(out, inputs, op);
    case NcclDataType::kUint32:
      return reduce_as<std::uint32_t>(out, inputs, op);
    case NcclDataType::kInt64:
      return reduce_as<std::int64_t>(out, inputs, op);
    case NcclDataType::kUint64:
      return reduce_as<std::uint64_t>(out, inputs, op);
    case NcclDataType::kFloat16:
      return reduce_as<Float16>(out, inputs, op);
    case NcclDataType::kFloat32:
      return reduce_as<float>(out, inputs, op);
    case NcclDataType::kFloat64:
      return reduce_as<double>(out, inputs, op);
    case NcclDataType::kBfloat16:
      return reduce_as<Bfloat16>(out, inputs, op);
  }
}

}  // namespace fake
