// Elementwise reduction of several buffers into one: the only arithmetic of the engine.
//
// One table of functions per instruction set; all tables give equal bits. For every element the
// addends are taken in the order of `srcs`, in the accumulation type (float32 for 16-bit floats, else the
// type itself), scaled once and rounded once; vectors span elements only. Rules for equal bits where
// hardware and compilers may differ:
//   - a NaN result is always the canonical quiet NaN (payloads of operands depend on operand
//   order);
//   - Min and Max give NaN if any addend is NaN; of equal addends (-0 and +0) the last one wins;
//   - a quotient is divided, not multiplied by a rounded reciprocal, so it is the correctly rounded
//   one of the sum; only powers of two, whose reciprocals are exact, are multiplied;
//   - integers wrap around; a scaled integer is computed in double, truncated and saturated (NaN
//   gives 0);
//   - bool is one byte, not zero = true: Sum and Max are "or", Product and Min are "and", never
//   scaled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "types.h"

namespace sparkhvd {

/// Factors of a reduction. `divisor` is the number of addends in the world for Average and 1
/// otherwise. A floating-point result is divided once, by divisor / postscale narrowed to the
/// accumulation type; where divisor is a power of two it is multiplied once, by postscale / divisor.
/// An integer becomes result * postscale / divisor in double, truncated.
struct Scaling {
  double prescale = 1;  // of every input
  double postscale = 1;
  int divisor = 1;
};

namespace kernels_detail {

struct Factors {
  double pre = 1;
  double post = 1;
  double divisor = 1;
  double float_divisor = 1;  // divisor / post: what a floating-point result is divided by
  bool has_pre = false;
  bool has_post = false;
  bool has_divisor = false;
};

struct Buffers {
  void* dst;
  void* const* copies;  // further destinations
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
  kOpAnd,  // this and the next two: of integers and bool
  kOpOr,
  kOpXor,
  kNumOperations
};

struct Table {
  ReduceFunction functions[kNumForms][kNumDTypes][kNumOperations];
};

// nullptr where this build has no kernels for the instruction set.
const Table* scalar_table() noexcept;
const Table* avx2_table() noexcept;
const Table* avx512_table() noexcept;
const Table* neon_table() noexcept;

}  // namespace kernels_detail

/// The reductions of one instruction set. Stateless; may be used by any number of threads at once.
/// Throws std::invalid_argument for Adasum, for bitwise operations on floating point, without sources and
/// for a division of bool: callers check before.
class Kernels {
 public:
  explicit constexpr Kernels(const kernels_detail::Table& table) noexcept : table_(&table) {}

  /// dst[i] = scaled and narrowed (srcs[0][i] op srcs[1][i] ...). `dst` may be one of `srcs`;
  /// other overlaps give undefined results. No alignment is needed.
  void reduce(DType dtype, ReduceOp op, void* dst, std::span<const void* const> srcs,
              std::size_t count, const Scaling& scaling) const;

  /// The same with the result stored to every one of `dsts` in one pass; each may be one of `srcs`.
  void reduce_to_all(DType dtype, ReduceOp op, std::span<void* const> dsts,
                     std::span<const void* const> srcs, std::size_t count,
                     const Scaling& scaling) const;

  /// The first half of a reduction between hosts: `accum` has accumulation_type(dtype) and may be
  /// one of `srcs` only where that is `dtype` itself. Applies prescale only.
  void reduce_partial(DType dtype, ReduceOp op, void* accum, std::span<const void* const> srcs,
                      std::size_t count, const Scaling& scaling) const;

  /// The second half: combines partial results in order, then postscale, divisor and the one
  /// rounding. `dst` may be one of `accums`.
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
