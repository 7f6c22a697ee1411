// The arithmetic of Adasum (arXiv:2006.02924): it combines orthogonal gradients to their sum, and equal gradients to
// their average. Dot products are added up in double, in an order that depends only on the count, so that every rank
// gets the same bits.
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

/// dst = a (1 - dot / (2 a.a)) + b (1 - dot / (2 b.b)). A factor is 1 if its square is 0. `dst` may be `a` or `b`.
void adasum_combine(std::span<float> dst, std::span<const float> a, std::span<const float> b,
                    const AdasumProducts& products);
void adasum_combine(std::span<double> dst, std::span<const double> a, std::span<const double> b,
                    const AdasumProducts& products);

}  // namespace sparkhvd
