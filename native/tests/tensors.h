// Tensors of every type as plain numbers, expected results of collectives, and layouts of ranks to test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "types.h"
#include "world.h"

namespace sparkhvd::test {

using Numbers = std::vector<double>;
using Sizes = std::vector<std::int64_t>;

struct Layout {
  std::vector<std::int32_t> hosts;
  bool use_shared_memory = true;
  std::uint32_t slots = 4;
};

/// Layouts: one host, one rank per host, hosts of equal and unequal size; with few and many slots.
inline const std::vector<Layout> kLayouts{
    {one_host(1)},           {one_host(2)},  {one_host(3), true, 2}, {one_host(5), true, 3},
    {one_host(2), false},    {{0, 1, 2}},    {{0, 0, 1, 1}},         {{0, 0, 1, 1}, true, 2},
    {{0, 0, 0, 1}, true, 3}, {{0, 0, 1, 2}}, {{0, 1, 0, 1, 1}}};

inline void on_layouts(const std::function<void(TestEngine&, std::int32_t, std::int32_t)>& body) {
  for (const auto& layout : kLayouts) {
    WorldOptions options;
    options.hosts = layout.hosts;
    options.use_shared_memory = layout.use_shared_memory;
    options.slots = layout.slots;
    const auto size = static_cast<std::int32_t>(layout.hosts.size());
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) { body(engine, rank, size); });
  }
}

inline constexpr std::int32_t kDTypes[] = {
    SPARKHVD_UINT8,   SPARKHVD_INT8,    SPARKHVD_UINT16, SPARKHVD_INT16,   SPARKHVD_UINT32,
    SPARKHVD_INT32,   SPARKHVD_UINT64,  SPARKHVD_INT64,  SPARKHVD_FLOAT16, SPARKHVD_BFLOAT16,
    SPARKHVD_FLOAT32, SPARKHVD_FLOAT64, SPARKHVD_BOOL};
inline constexpr std::int32_t kOps[] = {SPARKHVD_SUM, SPARKHVD_AVERAGE, SPARKHVD_MIN, SPARKHVD_MAX,
                                        SPARKHVD_PRODUCT};

inline bool is_half(std::int32_t dtype) {
  return dtype == SPARKHVD_FLOAT16 || dtype == SPARKHVD_BFLOAT16;
}
inline bool is_float(std::int32_t dtype) {
  return is_half(dtype) || dtype == SPARKHVD_FLOAT32 || dtype == SPARKHVD_FLOAT64;
}

/// Calls `use` with a value of the type in which the engine computes `dtype`.
template <class Use>
void with_type(std::int32_t dtype, Use use) {
  switch (dtype) {
    case SPARKHVD_UINT8:
    case SPARKHVD_BOOL:
      return use(std::uint8_t{});
    case SPARKHVD_INT8:
      return use(std::int8_t{});
    case SPARKHVD_UINT16:
      return use(std::uint16_t{});
    case SPARKHVD_INT16:
      return use(std::int16_t{});
    case SPARKHVD_UINT32:
      return use(std::uint32_t{});
    case SPARKHVD_INT32:
      return use(std::int32_t{});
    case SPARKHVD_UINT64:
      return use(std::uint64_t{});
    case SPARKHVD_INT64:
      return use(std::int64_t{});
    case SPARKHVD_FLOAT64:
      return use(double{});
    default:
      return use(float{});
  }
}

/// A tensor of any type, filled from and read as doubles.
class Tensor {
 public:
  Tensor(std::int32_t dtype, const Numbers& values)
      : dtype_(dtype),
        count_(values.size()),
        bytes_(values.size() * element_size(static_cast<DType>(dtype))) {
    with_type(dtype, [&](auto zero) {
      std::vector<decltype(zero)> typed(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        typed[i] = static_cast<decltype(zero)>(values[i]);
      }
      if (is_half(dtype)) {
        const void* sources[] = {typed.data()};
        kernels(SPARKHVD_ISA_SCALAR)
            .finish(static_cast<DType>(dtype), ReduceOp::kSum, bytes_.data(), sources, count_, {});
      } else if (!bytes_.empty()) {
        std::memcpy(bytes_.data(), typed.data(), bytes_.size());
      }
    });
  }
  std::byte* data() { return bytes_.data(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  Numbers values() const {
    Numbers result(count_);
    with_type(dtype_, [&](auto zero) {
      std::vector<decltype(zero)> typed(count_);
      if (is_half(dtype_)) {
        const void* sources[] = {bytes_.data()};
        kernels(SPARKHVD_ISA_SCALAR)
            .reduce_partial(static_cast<DType>(dtype_), ReduceOp::kSum, typed.data(), sources,
                            count_, {});
      } else if (!bytes_.empty()) {
        std::memcpy(typed.data(), bytes_.data(), bytes_.size());
      }
      for (std::size_t i = 0; i < count_; ++i) result[i] = static_cast<double>(typed[i]);
    });
    return result;
  }

 private:
  std::int32_t dtype_;
  std::size_t count_;
  std::vector<std::byte> bytes_;
};

/// A value of 0, 1 or 2: results of reductions over up to five ranks are exact in every type.
inline double value(std::int32_t rank, std::size_t index) {
  return static_cast<double>((index * 7 + static_cast<std::size_t>(rank) * 5 + index / 3) % 3);
}

inline Numbers values_of(std::int32_t rank, std::size_t count, std::int32_t dtype) {
  Numbers values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = dtype == SPARKHVD_BOOL ? std::min(value(rank, i), 1.0) : value(rank, i);
  }
  return values;
}

inline double combined(std::int32_t dtype, std::int32_t op, double a, double b) {
  const bool is_bool = dtype == SPARKHVD_BOOL;
  switch (op) {
    case SPARKHVD_MIN:
      return std::min(a, b);
    case SPARKHVD_MAX:
      return std::max(a, b);
    case SPARKHVD_PRODUCT:
      return a * b;
    default:
      return is_bool ? std::max(a, b) : a + b;
  }
}

/// The expected result of a reduction over all ranks, before it is rounded to the type.
inline Numbers expected_of(std::int32_t size, std::size_t count, std::int32_t dtype,
                           std::int32_t op) {
  Numbers result = values_of(0, count, dtype);
  for (std::int32_t rank = 1; rank < size; ++rank) {
    const Numbers next = values_of(rank, count, dtype);
    for (std::size_t i = 0; i < count; ++i) result[i] = combined(dtype, op, result[i], next[i]);
  }
  if (op == SPARKHVD_AVERAGE) {
    for (double& number : result) {
      number /= size;
      if (!is_float(dtype)) number = std::trunc(number);
    }
  }
  return result;
}

inline void check_close(const Numbers& found, const Numbers& expected, std::int32_t dtype,
                        const std::string& what) {
  CHECK_EQUAL(found.size(), expected.size());
  const double tolerance = dtype == SPARKHVD_BFLOAT16  ? 1e-2
                           : dtype == SPARKHVD_FLOAT16 ? 1e-3
                           : dtype == SPARKHVD_FLOAT32 ? 1e-6
                           : dtype == SPARKHVD_FLOAT64 ? 1e-14
                                                       : 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (std::abs(found[i] - expected[i]) <= tolerance * (1 + std::abs(expected[i]))) continue;
    throw Failure(what + ", at " + std::to_string(i) + ": " + std::to_string(found[i]) +
                  " instead of " + std::to_string(expected[i]));
  }
}

inline std::string label(std::int32_t dtype, std::int32_t op, std::size_t count) {
  return std::string(name_of(static_cast<DType>(dtype))) + " " +
         std::string(name_of(static_cast<ReduceOp>(op))) + " " + std::to_string(count);
}

inline Sizes shape_of(std::size_t rows, std::size_t columns) {
  return {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns)};
}

}  // namespace sparkhvd::test
