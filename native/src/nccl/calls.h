// The calls of NCCL for one operation, in terms of collectives. They only enqueue.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "nccl/device_operation.h"
#include "nccl/nccl_api.h"

namespace sparkhvd::nccl {

/// NCCL's type for reductions, if any.
std::optional<NcclDataType> nccl_type(DType dtype) noexcept;
/// NCCL's operation on it, if any (not Average, Adasum).
std::optional<NcclOp> nccl_op(ReduceOp op, DType dtype) noexcept;

/// Memory for a rank that has joined: it contributes zeros, and its results are not read.
struct Scratch {
  const std::byte* zeros = nullptr;
  std::byte* results = nullptr;
};

/// The members' rows of a tensor, in elements of a row.
struct Rows {
  std::size_t row_bytes = 0;
  std::size_t row_elements = 0;
  std::vector<std::size_t> counts;  // by member

  std::size_t offset(std::size_t member) const;
  bool is_even() const;
};

class Calls {
 public:
  /// `tensors`: the caller's, or empty for a rank that has joined.
  Calls(const NcclApi& nccl, ncclComm_t communicator, NcclStream stream, const Launch& launch,
        std::span<const OnDevice::Tensor> tensors, const Scratch& scratch)
      : nccl_(nccl),
        communicator_(communicator),
        stream_(stream),
        launch_(launch),
        descriptor_(launch.descriptor()),
        tensors_(tensors),
        scratch_(scratch) {}

  const Descriptor& descriptor() const noexcept { return descriptor_; }
  const std::vector<std::int64_t>& rows() const noexcept { return launch_.rows; }
  std::size_t members() const noexcept { return launch_.ranks.size(); }
  std::size_t index() const noexcept { return launch_.index; }
  std::size_t index_of(Rank rank) const;
  const std::byte* input(std::size_t tensor) const;
  std::byte* output(std::size_t tensor) const;

  std::size_t elements(std::size_t tensor) const;
  /// Without counts.
  Rows shape(std::size_t tensor) const;
  /// The first dimension divided: the first ranks get one more.
  Rows divided_rows(std::size_t tensor) const;

  // Zero bytes enqueue nothing.
  void allreduce(const void* input, void* output, std::size_t count) const;
  void reduce(const void* input, void* output, std::size_t count, std::size_t root) const;
  void reduce_scatter(const void* input, void* output, std::size_t count) const;
  void broadcast(const void* input, void* output, std::size_t bytes, std::size_t root) const;
  void send(const void* input, std::size_t bytes, std::size_t to) const;
  void receive(void* output, std::size_t bytes, std::size_t from) const;
  /// Every member's bytes to all: `own` has this rank's, `output` all.
  void gather_to_all(const Rows& rows, const std::byte* own, std::byte* output) const;

 private:
  /// In a group errors belong to the group, except errors of a call's own arguments.
  void check(NcclResult result, const char* call) const;
  NcclDataType type() const { return nccl_type(descriptor_.dtype).value(); }
  NcclOp op() const { return nccl_op(descriptor_.reduce_op, descriptor_.dtype).value(); }

  const NcclApi& nccl_;
  ncclComm_t communicator_;
  NcclStream stream_;
  const Launch& launch_;
  const Descriptor& descriptor_;
  std::span<const OnDevice::Tensor> tensors_;
  const Scratch& scratch_;
};

}  // namespace sparkhvd::nccl
