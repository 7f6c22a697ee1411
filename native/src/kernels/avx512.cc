// The kernels for AVX-512. Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl; empty without
// them.
#include "kernels/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#define SPARKHVD_VECTOR_BYTES 64

namespace sparkhvd::kernels_detail {
namespace {

// The code uses intrinsics with a full mask, because GCC 12 warns that the plain intrinsics read an uninitialised
// vector.
constexpr __mmask16 kAllLanes = 0xffff;

template <typename Floats>
[[gnu::always_inline]] inline Floats widen_float16(const std::uint16_t* from) {
  return _mm512_maskz_cvtph_ps(kAllLanes,
                               _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from)));
}

template <typename Floats>
[[gnu::always_inline]] inline void narrow_float16(std::uint16_t* to, const Floats& value) {
  const __m256i halves =
      _mm512_maskz_cvtps_ph(kAllLanes, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), halves);
}

}  // namespace
}  // namespace sparkhvd::kernels_detail

#include "kernels/kernels_impl.h"

const sparkhvd::kernels_detail::Table* sparkhvd::kernels_detail::avx512_table() noexcept {
  return &kTable;
}

#else

const sparkhvd::kernels_detail::Table* sparkhvd::kernels_detail::avx512_table() noexcept {
  return nullptr;
}

#endif
