#include "kernels/adasum.h"

#include <array>
#include <cstddef>

namespace sparkhvd {
namespace {

// Number of independent sums, which are added up in order at the end. It is enough for any vector width and equal on
// all CPUs, so all CPUs give equal bits.
constexpr std::size_t kLanes = 8;

template <class T>
AdasumProducts products_of(std::span<const T> a, std::span<const T> b) {
  std::array<double, kLanes> dot{};
  std::array<double, kLanes> square_a{};
  std::array<double, kLanes> square_b{};
  const auto add = [&](std::size_t i, std::size_t lane) {
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    dot[lane] += x * y;
    square_a[lane] += x * x;
    square_b[lane] += y * y;
  };
  std::size_t i = 0;
  for (; i + kLanes <= a.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (std::size_t lane = 0; i < a.size(); ++i, ++lane) add(i, lane);
  AdasumProducts result;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    result.dot += dot[lane];
    result.square_a += square_a[lane];
    result.square_b += square_b[lane];
  }
  return result;
}

template <class T>
void combine(std::span<T> dst, std::span<const T> a, std::span<const T> b,
             const AdasumProducts& products) {
  const auto factor = [&](double square) {
    return square == 0 ? 1.0 : 1.0 - products.dot / (2 * square);
  };
  const double factor_a = factor(products.square_a);
  const double factor_b = factor(products.square_b);
  for (std::size_t i = 0; i < dst.size(); ++i) {
    dst[i] =
        static_cast<T>(factor_a * static_cast<double>(a[i]) + factor_b * static_cast<double>(b[i]));
  }
}

}  // namespace

AdasumProducts adasum_products(std::span<const float> a, std::span<const float> b) {
  return products_of(a, b);
}
AdasumProducts adasum_products(std::span<const double> a, std::span<const double> b) {
  return products_of(a, b);
}
void adasum_combine(std::span<float> dst, std::span<const float> a, std::span<const float> b,
                    const AdasumProducts& products) {
  combine(dst, a, b, products);
}
void adasum_combine(std::span<double> dst, std::span<const double> a, std::span<const double> b,
                    const AdasumProducts& products) {
  combine(dst, a, b, products);
}

}  // namespace sparkhvd
