// The kernels for AVX2 with F16C. Compiled with -mavx2 -mf16c; empty without them.
#include "kernels/kernels.h"

#if defined(__AVX2__) && defined(__F16C__)

#include <immintrin.h>

#define SPARKHVD_VECTOR_BYTES 32

namespace sparkhvd::kernels_detail {
namespace {

template <typename Floats>
[[gnu::always_inline]] inline Floats widen_float16(const std::uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
}

template <typename Floats>
[[gnu::always_inline]] inline void narrow_float16(std::uint16_t* to, const Floats& value) {
  const __m128i halves = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), halves);
}

}  // namespace
}  // namespace sparkhvd::kernels_detail

#include "kernels/kernels_impl.h"

const sparkhvd::kernels_detail::Table* sparkhvd::kernels_detail::avx2_table() noexcept {
  return &kTable;
}

#else

const sparkhvd::kernels_detail::Table* sparkhvd::kernels_detail::avx2_table() noexcept {
  return nullptr;
}

#endif
