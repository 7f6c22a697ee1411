// The NCCL calls of one operation. They only enqueue work on a stream.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "nccl/device_operation.h"
#include "nccl/nccl_api.h"

namespace sparkhvd::nccl {

/// NCCL's type for reductions of `dtype`, if it has such a type.
std::optional<NcclDataType> nccl_type(DType dtype) noexcept;
/// NCCL's operation for a reduction, if it has such an operation (not for Average and Adasum).
std::optional<NcclOp> nccl_op(ReduceOp op, DType dtype) noexcept;

/// Memory for a rank that has joined: it contributes zeros, and its results are not read.
struct Scratch {
  const std::byte* zeros = nullptr;
  std::byte* results = nullptr;
};

/// The rows of a tensor by member, and the size of a row.
struct Rows {
  std::size_t row_bytes = 0;
  std::size_t row_elements = 0;
  std::vector<std::size_t> counts;  // by member

  std::size_t offset(std::size_t member) const;
  bool is_even() const;
};

class Calls {
 public:
  /// `tensors`: the caller's tensors; empty for a rank that has joined.
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
  /// Rows with the size of a row, but without counts.
  Rows shape(std::size_t tensor) const;
  /// Rows with the first dimension divided among the ranks; the first ranks get an additional row.
  Rows divided_rows(std::size_t tensor) const;

  // These functions enqueue nothing if there are no bytes.
  void allreduce(const void* input, void* output, std::size_t count) const;
  void reduce(const void* input, void* output, std::size_t count, std::size_t root) const;
  void reduce_scatter(const void* input, void* output, std::size_t count) const;
  void broadcast(const void* input, void* output, std::size_t bytes, std::size_t root) const;
  void send(const void* input, std::size_t bytes, std::size_t to) const;
  void receive(void* output, std::size_t bytes, std::size_t from) const;
  /// Sends every member's rows to all members. `own`: this rank's rows. `output`: memory for all rows.
  void gather_to_all(const Rows& rows, const std::byte* own, std::byte* output) const;

 private:
  /// Throws if a call has failed. Inside a group NCCL reports most errors at the end of the group.
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
