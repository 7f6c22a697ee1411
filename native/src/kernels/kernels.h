// Elementwise reduction of several buffers into one: the only arithmetic of the engine.
//
// There is one table of functions per instruction set, and all tables give equal bits. Each element is added up in the
// order of `srcs`, in the accumulation type (float32 for 16-bit floats, else the type itself), then scaled once and
// rounded once. Vector instructions work across elements, never across the addends of an element. Rules for equal bits
// where hardware and compilers may differ:
//   - a NaN result is always the canonical quiet NaN (payloads of operands depend on operand
//   order);
//   - Min and Max give NaN if any addend is NaN; of equal addends (-0 and +0) the last one wins;
//   - an average divides the sum and does not multiply it by a rounded reciprocal, so it is rounded correctly; only for
//   powers of two, with exact reciprocals, it multiplies;
//   - integers wrap around; a scaled integer is computed in double, truncated and saturated (NaN
//   gives 0);
//   - bool is one byte, and any value except 0 is true: Sum and Max are "or", Product and Min are "and"; bool is never
//   scaled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "types.h"

namespace sparkhvd {

/// Factors of a reduction. `divisor` is the number of all addends for Average, and 1 otherwise. A floating-point result
/// is divided once, by divisor / postscale in the accumulation type; if divisor is a power of two, it is multiplied
/// once, by postscale / divisor. An integer result becomes result * postscale / divisor, computed in double and
/// truncated.
struct Scaling {
  double prescale = 1;  // factor of every input
  double postscale = 1;
  int divisor = 1;
};

namespace kernels_detail {

struct Factors {
  double pre = 1;
  double post = 1;
  double divisor = 1;
  double float_divisor = 1;  // divisor / post, which divides a floating-point result
  bool has_pre = false;
  bool has_post = false;
  bool has_divisor = false;
};

struct Buffers {
  void* dst;
  void* const* copies;  // further destinations of the result
  std::size_t num_copies;
  const void* const* srcs;
  std::size_t num_srcs;
  std::size_t count;
};

using ReduceFunction = void (*)(const Buffers&, const Factors&);

enum Form : std::uint8_t { kReduce, kPartial, kFinish, kNumForms };
enum Operation : std::uint8_t {
  kOpSum,
  kOpMin,
  kOpMax,
  kOpProduct,
  kOpAnd,  // the three bit operations are for integers and bool
  kOpOr,
  kOpXor,
  kNumOperations
};

struct Table {
  ReduceFunction functions[kNumForms][kNumDTypes][kNumOperations];
};

// Each function returns nullptr if this build has no kernels for the instruction set.
const Table* scalar_table() noexcept;
const Table* avx2_table() noexcept;
const Table* avx512_table() noexcept;
const Table* neon_table() noexcept;

}  // namespace kernels_detail

/// The reductions of one instruction set. The class has no state, so any number of threads may use it at once.
/// Functions throw std::invalid_argument for Adasum, bitwise operations on floating point, an empty list of sources,
/// and an average of bool. Callers check this before.
class Kernels {
 public:
  explicit constexpr Kernels(const kernels_detail::Table& table) noexcept : table_(&table) {}

  /// Computes dst[i] = srcs[0][i] op srcs[1][i] ..., scaled and converted to the element type. `dst` may be one of
  /// `srcs`; other overlaps give undefined results. No alignment is needed.
  void reduce(DType dtype, ReduceOp op, void* dst, std::span<const void* const> srcs,
              std::size_t count, const Scaling& scaling) const;

  /// Does `reduce` and stores the result to all of `dsts` in one pass. Each of them may be one of `srcs`.
  void reduce_to_all(DType dtype, ReduceOp op, std::span<void* const> dsts,
                     std::span<const void* const> srcs, std::size_t count,
                     const Scaling& scaling) const;

  /// Does the first half of a reduction between hosts, with prescale only. `accum` has accumulation_type(dtype); it may
  /// be one of `srcs` only if this type is `dtype` itself.
  void reduce_partial(DType dtype, ReduceOp op, void* accum, std::span<const void* const> srcs,
                      std::size_t count, const Scaling& scaling) const;

  /// Does the second half: combines partial results in order, applies postscale and divisor, and rounds once. `dst` may
  /// be one of `accums`.
  void finish(DType dtype, ReduceOp op, void* dst, std::span<const void* const> accums,
              std::size_t count, const Scaling& scaling) const;

 private:
  const kernels_detail::Table* table_;
};

/// True when this CPU and this build have the instruction set SPARKHVD_ISA_*.
bool isa_available(int isa) noexcept;

/// The kernels of an instruction set; AUTO gives the widest available. Throws std::invalid_argument
/// when it is not available.
const Kernels& kernels(int isa);

}  // namespace sparkhvd
