// The kernels for NEON, which every aarch64 CPU has; empty elsewhere.
//
// The vectors are as wide as the vectors of scalar.cc. Only float16 differs: one instruction converts four elements
// (FCVTL exactly, FCVTN to nearest even), with the same results as the code in scalar.cc.
#include "kernels/kernels.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define SPARKHVD_VECTOR_BYTES 16

namespace sparkhvd::kernels_detail {
namespace {

template <typename Floats>
[[gnu::always_inline]] inline Floats widen_float16(const std::uint16_t* from) {
  const float32x4_t wide = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
  return reinterpret_cast<Floats>(wide);
}

template <typename Floats>
[[gnu::always_inline]] inline void narrow_float16(std::uint16_t* to, const Floats& value) {
  const float16x4_t halves = vcvt_f16_f32(reinterpret_cast<float32x4_t>(value));
  vst1_u16(to, vreinterpret_u16_f16(halves));
}

}  // namespace
}  // namespace sparkhvd::kernels_detail

#include "kernels/kernels_impl.h"

const sparkhvd::kernels_detail::Table* sparkhvd::kernels_detail::neon_table() noexcept {
  return &kTable;
}

#else

const sparkhvd::kernels_detail::Table* sparkhvd::kernels_detail::neon_table() noexcept {
  return nullptr;
}

#endif
