// The arithmetic of Adasum (arXiv:2006.02924): two gradients are added the less the more they point
// in the same direction. Sums in double, in an order that depends on nothing but the count, so that
// every rank gets the same bits.
#pragma once

#include <span>

namespace sparkhvd {

struct AdasumProducts {
  double dot = 0;       // a . b
  double square_a = 0;  // a . a
  double square_b = 0;  // b . b
};

AdasumProducts adasum_products(std::span<const float> a, std::span<const float> b);
AdasumProducts adasum_products(std::span<const double> a, std::span<const double> b);

/// dst = a (1 - dot / (2 a.a)) + b (1 - dot / (2 b.b)); a factor is 1 where the square is 0. `dst`
/// may be `a` or `b`.
void adasum_combine(std::span<float> dst, std::span<const float> a, std::span<const float> b,
                    const AdasumProducts& products);
void adasum_combine(std::span<double> dst, std::span<const double> a, std::span<const double> b,
                    const AdasumProducts& products);

}  // namespace sparkhvd
