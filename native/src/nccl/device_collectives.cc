#include "nccl/device_collectives.h"

#include <algorithm>
#include <numeric>

#include "error.h"

namespace sparkhvd::nccl {
namespace {

/// The rows of a tensor of which each member has some: in elements of a row.
struct Rows {
  std::size_t row_bytes = 0;
  std::size_t row_elements = 0;
  std::vector<std::size_t> counts;  // by member

  std::size_t offset(std::size_t member) const {
    return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(member),
                           std::size_t{0}) *
           row_bytes;
  }
  bool is_even() const {
    return std::ranges::adjacent_find(counts, std::ranges::not_equal_to()) == counts.end();
  }
};

class Enqueuer {
 public:
  Enqueuer(const NcclApi& nccl, ncclComm_t communicator, NcclStream stream, const Launch& launch,
           std::span<const OnDevice::Tensor> tensors, const Scratch& scratch)
      : nccl_(nccl),
        communicator_(communicator),
        stream_(stream),
        launch_(launch),
        descriptor_(launch.descriptor()),
        tensors_(tensors),
        scratch_(scratch) {}

  void run() const {
    for (std::size_t i = 0; i < descriptor_.shapes.size(); ++i) {
      switch (descriptor_.collective) {
        case Collective::kAllreduce:
          allreduce(i);
          break;
        case Collective::kReducescatter:
          reducescatter(i);
          break;
        case Collective::kAllgather:
          allgather(i);
          break;
        case Collective::kAllgatherInto:
          allgather_into(i);
          break;
        case Collective::kBroadcast:
          broadcast(i);
          break;
        case Collective::kAlltoall:
          alltoall(i);
          break;
        default:
          throw Error(SPARKHVD_INTERNAL, "an operation that no device runs");
      }
    }
  }

 private:
  std::size_t members() const { return launch_.ranks.size(); }
  std::size_t elements(std::size_t i) const {
    return static_cast<std::size_t>(
        count_elements(descriptor_.shapes[i], descriptor_.dtype).value());
  }
  /// In a group errors are the group's, but for those of a call's own arguments.
  void check(NcclResult result, const char* call) const {
    if (result != NcclResult::kInProgress) nccl_.check(result, call, communicator_);
  }
  NcclDataType type() const { return nccl_type(descriptor_.dtype).value(); }
  NcclOp op() const { return nccl_op(descriptor_.reduce_op, descriptor_.dtype).value(); }

  Rows rows(std::size_t i) const {
    const auto& shape = descriptor_.shapes[i];
    Rows result;
    result.row_elements = 1;
    for (std::size_t k = 1; k < shape.size(); ++k) {
      result.row_elements *= static_cast<std::size_t>(shape[k]);
    }
    result.row_bytes = result.row_elements * element_size(descriptor_.dtype);
    return result;
  }
  /// The first ranks get one more.
  Rows divided_rows(std::size_t i) const {
    Rows result = rows(i);
    const auto all = static_cast<std::size_t>(descriptor_.shapes[i][0]);
    for (std::size_t member = 0; member < members(); ++member) {
      result.counts.push_back(all / members() + (member < all % members() ? 1 : 0));
    }
    return result;
  }

  void allreduce(std::size_t i) const {
    const std::size_t count = elements(i);
    if (count == 0) return;
    const bool has_joined = launch_.operation == nullptr;
    const void* input = has_joined ? scratch_.zeros : tensors_[i].input;
    void* output = has_joined ? scratch_.results : tensors_[i].output;
    check(nccl_.ncclAllReduce(input, output, count, type(), op(), communicator_, stream_),
          "ncclAllReduce");
  }

  void reducescatter(std::size_t i) const {
    const Rows rows = divided_rows(i);
    const std::byte* input = tensors_[i].input;
    if (rows.is_even()) {
      const std::size_t count = rows.counts[0] * rows.row_elements;
      if (count == 0) return;
      check(nccl_.ncclReduceScatter(input, tensors_[i].output, count, type(), op(), communicator_,
                                    stream_),
            "ncclReduceScatter");
      return;
    }
    for (std::size_t member = 0; member < members(); ++member) {
      const std::size_t count = rows.counts[member] * rows.row_elements;
      if (count == 0) continue;
      void* output = member == launch_.index ? tensors_[i].output : nullptr;
      check(nccl_.ncclReduce(input + rows.offset(member), output, count, type(), op(),
                             static_cast<int>(member), communicator_, stream_),
            "ncclReduce");
    }
  }

  /// Every member's bytes to all: `own` where this rank has its own, `output` of all.
  void gather(const Rows& rows, const std::byte* own, std::byte* output) const {
    if (rows.is_even()) {
      const std::size_t bytes = rows.counts[0] * rows.row_bytes;
      if (bytes == 0) return;
      check(nccl_.ncclAllGather(own, output, bytes, NcclDataType::kUint8, communicator_, stream_),
            "ncclAllGather");
      return;
    }
    for (std::size_t member = 0; member < members(); ++member) {
      const std::size_t bytes = rows.counts[member] * rows.row_bytes;
      if (bytes == 0) continue;
      std::byte* part = output + rows.offset(member);
      const std::byte* input = member == launch_.index ? own : part;
      check(nccl_.ncclBroadcast(input, part, bytes, NcclDataType::kUint8, static_cast<int>(member),
                                communicator_, stream_),
            "ncclBroadcast");
    }
  }

  void allgather(std::size_t i) const {
    Rows gathered = rows(i);
    for (std::size_t member = 0; member < members(); ++member) {
      gathered.counts.push_back(static_cast<std::size_t>(launch_.rows[i * members() + member]));
    }
    gather(gathered, tensors_[i].input, tensors_[i].output);
  }

  void allgather_into(std::size_t i) const {
    const Rows rows = divided_rows(i);
    std::byte* output = tensors_[i].output;
    gather(rows, output + rows.offset(launch_.index), output);
  }

  void broadcast(std::size_t i) const {
    const std::size_t bytes = elements(i) * element_size(descriptor_.dtype);
    if (bytes == 0) return;
    const auto root = std::ranges::find(launch_.ranks, descriptor_.root) - launch_.ranks.begin();
    check(nccl_.ncclBroadcast(tensors_[i].input, tensors_[i].output, bytes, NcclDataType::kUint8,
                              static_cast<int>(root), communicator_, stream_),
          "ncclBroadcast");
  }

  void alltoall(std::size_t i) const {
    const Rows shape = rows(i);
    const auto bytes_of = [&](std::int64_t rows) {
      return static_cast<std::size_t>(rows) * shape.row_bytes;
    };
    const std::byte* input = tensors_[i].input;
    std::byte* output = tensors_[i].output;
    for (std::size_t member = 0; member < members(); ++member) {
      const auto peer = static_cast<int>(member);
      if (const std::size_t bytes = bytes_of(descriptor_.numbers[member]); bytes > 0) {
        check(nccl_.ncclSend(input, bytes, NcclDataType::kUint8, peer, communicator_, stream_),
              "ncclSend");
        input += bytes;
      }
      if (const std::size_t bytes = bytes_of(launch_.rows[member]); bytes > 0) {
        check(nccl_.ncclRecv(output, bytes, NcclDataType::kUint8, peer, communicator_, stream_),
              "ncclRecv");
        output += bytes;
      }
    }
  }

  const NcclApi& nccl_;
  ncclComm_t communicator_;
  NcclStream stream_;
  const Launch& launch_;
  const Descriptor& descriptor_;
  std::span<const OnDevice::Tensor> tensors_;
  const Scratch& scratch_;
};

}  // namespace

std::size_t scratch_bytes(const Descriptor& descriptor) {
  std::size_t most = 0;
  for (const auto& shape : descriptor.shapes) {
    const std::size_t bytes =
        count_elements(shape, descriptor.dtype).value() * element_size(descriptor.dtype);
    most = std::max(most, bytes);
  }
  return most;
}

bool has_work(const Launch& launch) {
  const Descriptor& descriptor = launch.descriptor();
  if (descriptor.collective == Collective::kRegister) return false;
  const bool is_agreed = descriptor.collective == Collective::kAllgather ||
                         descriptor.collective == Collective::kAlltoall;
  for (std::size_t i = 0; i < descriptor.shapes.size(); ++i) {
    std::vector<std::int64_t> shape = descriptor.shapes[i];
    if (is_agreed && !shape.empty()) {
      // What this rank has says nothing of the others' rows.
      const std::size_t members = launch.ranks.size();
      const std::size_t per_tensor =
          descriptor.collective == Collective::kAllgather ? members : launch.rows.size();
      const auto first = launch.rows.begin() + static_cast<std::ptrdiff_t>(i * per_tensor);
      const bool has_rows = std::any_of(first, first + static_cast<std::ptrdiff_t>(per_tensor),
                                        [](auto rows) { return rows > 0; });
      shape[0] = has_rows ? 1 : 0;
    }
    if (count_elements(shape, descriptor.dtype).value() > 0) return true;
  }
  return false;
}

void enqueue(const NcclApi& nccl, ncclComm_t communicator, NcclStream stream, const Launch& launch,
             std::span<const OnDevice::Tensor> tensors, const Scratch& scratch) {
  Enqueuer(nccl, communicator, stream, launch, tensors, scratch).run();
}

const char* algorithm_of(Collective collective) noexcept {
  switch (collective) {
    case Collective::kAllreduce:
      return "nccl_allreduce";
    case Collective::kReducescatter:
      return "nccl_reducescatter";
    case Collective::kAllgather:
      return "nccl_allgather";
    case Collective::kAllgatherInto:
      return "nccl_allgather_into";
    case Collective::kBroadcast:
      return "nccl_broadcast";
    case Collective::kAlltoall:
      return "nccl_alltoall";
    case Collective::kRegister:
      return "nccl_register";
    default:
      return "";
  }
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
  const bool is_bool = dtype == DType::kBool;  // bytes of 0 or 1: "or" is Max, "and" is Min
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
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace sparkhvd::nccl
