#include "nccl/calls.h"

#include <algorithm>
#include <numeric>

namespace sparkhvd::nccl {

std::size_t Rows::offset(std::size_t member) const {
  return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(member),
                         std::size_t{0}) *
         row_bytes;
}

bool Rows::is_even() const {
  return std::ranges::adjacent_find(counts, std::ranges::not_equal_to()) == counts.end();
}

std::size_t Calls::index_of(Rank rank) const {
  return static_cast<std::size_t>(std::ranges::find(launch_.ranks, rank) - launch_.ranks.begin());
}

const std::byte* Calls::input(std::size_t tensor) const {
  return launch_.operation ? tensors_[tensor].input : scratch_.zeros;
}

std::byte* Calls::output(std::size_t tensor) const {
  return launch_.operation ? tensors_[tensor].output : scratch_.results;
}

std::size_t Calls::elements(std::size_t tensor) const {
  return static_cast<std::size_t>(
      count_elements(descriptor_.shapes[tensor], descriptor_.dtype).value());
}

Rows Calls::shape(std::size_t tensor) const {
  const auto& shape = descriptor_.shapes[tensor];
  Rows result;
  result.row_elements = 1;
  for (std::size_t k = 1; k < shape.size(); ++k) {
    result.row_elements *= static_cast<std::size_t>(shape[k]);
  }
  result.row_bytes = result.row_elements * element_size(descriptor_.dtype);
  return result;
}

Rows Calls::divided_rows(std::size_t tensor) const {
  Rows result = shape(tensor);
  const auto all = static_cast<std::size_t>(descriptor_.shapes[tensor][0]);
  for (std::size_t member = 0; member < members(); ++member) {
    result.counts.push_back(all / members() + (member < all % members() ? 1 : 0));
  }
  return result;
}

void Calls::allreduce(const void* input, void* output, std::size_t count) const {
  if (count == 0) return;
  check(nccl_.ncclAllReduce(input, output, count, type(), op(), communicator_, stream_),
        "ncclAllReduce");
}

void Calls::reduce(const void* input, void* output, std::size_t count, std::size_t root) const {
  if (count == 0) return;
  check(nccl_.ncclReduce(input, output, count, type(), op(), static_cast<int>(root), communicator_,
                         stream_),
        "ncclReduce");
}

void Calls::reduce_scatter(const void* input, void* output, std::size_t count) const {
  if (count == 0) return;
  check(nccl_.ncclReduceScatter(input, output, count, type(), op(), communicator_, stream_),
        "ncclReduceScatter");
}

void Calls::broadcast(const void* input, void* output, std::size_t bytes, std::size_t root) const {
  if (bytes == 0) return;
  check(nccl_.ncclBroadcast(input, output, bytes, NcclDataType::kUint8, static_cast<int>(root),
                            communicator_, stream_),
        "ncclBroadcast");
}

void Calls::send(const void* input, std::size_t bytes, std::size_t to) const {
  if (bytes == 0) return;
  check(nccl_.ncclSend(input, bytes, NcclDataType::kUint8, static_cast<int>(to), communicator_,
                       stream_),
        "ncclSend");
}

void Calls::receive(void* output, std::size_t bytes, std::size_t from) const {
  if (bytes == 0) return;
  check(nccl_.ncclRecv(output, bytes, NcclDataType::kUint8, static_cast<int>(from), communicator_,
                       stream_),
        "ncclRecv");
}

void Calls::gather_to_all(const Rows& rows, const std::byte* own, std::byte* output) const {
  if (!rows.is_even()) {
    for (std::size_t member = 0; member < members(); ++member) {
      std::byte* part = output + rows.offset(member);
      broadcast(member == index() ? own : part, part, rows.counts[member] * rows.row_bytes, member);
    }
    return;
  }
  const std::size_t bytes = rows.counts[0] * rows.row_bytes;
  if (bytes == 0) return;
  check(nccl_.ncclAllGather(own, output, bytes, NcclDataType::kUint8, communicator_, stream_),
        "ncclAllGather");
}

void Calls::check(NcclResult result, const char* call) const {
  if (result != NcclResult::kInProgress) nccl_.check(result, call, communicator_);
}

std::optional<NcclDataType> nccl_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8:
    case DType::kBool:
      return NcclDataType::kUint8;
    case DType::kInt8:
      return NcclDataType::kInt8;
    case DType::kUint32:
      return NcclDataType::kUint32;
    case DType::kInt32:
      return NcclDataType::kInt32;
    case DType::kUint64:
      return NcclDataType::kUint64;
    case DType::kInt64:
      return NcclDataType::kInt64;
    case DType::kFloat16:
      return NcclDataType::kFloat16;
    case DType::kBfloat16:
      return NcclDataType::kBfloat16;
    case DType::kFloat32:
      return NcclDataType::kFloat32;
    case DType::kFloat64:
      return NcclDataType::kFloat64;
    case DType::kUint16:
    case DType::kInt16:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<NcclOp> nccl_op(ReduceOp op, DType dtype) noexcept {
  const bool is_bool = dtype == DType::kBool;  // a byte of 0 or 1: Max is "or", Min is "and"
  switch (op) {
    case ReduceOp::kSum:
      return is_bool ? NcclOp::kMax : NcclOp::kSum;
    case ReduceOp::kMax:
      return NcclOp::kMax;
    case ReduceOp::kMin:
      return NcclOp::kMin;
    case ReduceOp::kProduct:
      return is_bool ? NcclOp::kMin : NcclOp::kProduct;
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace sparkhvd::nccl
