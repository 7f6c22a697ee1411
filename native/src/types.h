// Basic types of the engine: element types, reductions and ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "sparkhvd.h"

namespace sparkhvd {

/// Index of a process in the world. A type of its own, so that the compiler rejects a count in its place.
enum class Rank : std::int32_t {};

constexpr std::int32_t index_of(Rank rank) noexcept { return static_cast<std::int32_t>(rank); }

enum class DType : std::int32_t {
  kUint8 = SPARKHVD_UINT8,
  kInt8 = SPARKHVD_INT8,
  kUint16 = SPARKHVD_UINT16,
  kInt16 = SPARKHVD_INT16,
  kUint32 = SPARKHVD_UINT32,
  kInt32 = SPARKHVD_INT32,
  kUint64 = SPARKHVD_UINT64,
  kInt64 = SPARKHVD_INT64,
  kFloat16 = SPARKHVD_FLOAT16,
  kBfloat16 = SPARKHVD_BFLOAT16,
  kFloat32 = SPARKHVD_FLOAT32,
  kFloat64 = SPARKHVD_FLOAT64,
  kBool = SPARKHVD_BOOL,
};
inline constexpr std::int32_t kNumDTypes = SPARKHVD_BOOL + 1;

constexpr bool is_float(DType dtype) noexcept {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

enum class ReduceOp : std::int32_t {
  kAverage = SPARKHVD_AVERAGE,
  kSum = SPARKHVD_SUM,
  kAdasum = SPARKHVD_ADASUM,
  kMin = SPARKHVD_MIN,
  kMax = SPARKHVD_MAX,
  kProduct = SPARKHVD_PRODUCT,
  kBitAnd = SPARKHVD_BIT_AND,
  kBitOr = SPARKHVD_BIT_OR,
  kBitXor = SPARKHVD_BIT_XOR,
};
inline constexpr std::int32_t kNumReduceOps = SPARKHVD_BIT_XOR + 1;

constexpr bool is_of_bits(ReduceOp op) noexcept {
  return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
}

enum class Collective : std::int32_t {
  kAllreduce = SPARKHVD_ALLREDUCE,
  kAllgather = SPARKHVD_ALLGATHER,
  kBroadcast = SPARKHVD_BROADCAST,
  kBarrier = SPARKHVD_BARRIER,
  kAlltoall = SPARKHVD_ALLTOALL,
  kReducescatter = SPARKHVD_REDUCESCATTER,
  kJoin = SPARKHVD_JOIN,
  kAddProcessSet = SPARKHVD_ADD_PROCESS_SET,
  kRemoveProcessSet = SPARKHVD_REMOVE_PROCESS_SET,
  kRegister = SPARKHVD_REGISTER,
  kConfigure = SPARKHVD_CONFIGURE,
  kAllgatherInto = SPARKHVD_ALLGATHER_INTO,
  kReduce = SPARKHVD_REDUCE,
  kGather = SPARKHVD_GATHER,
  kScatter = SPARKHVD_SCATTER,
  kSend = SPARKHVD_SEND,
  kReceive = SPARKHVD_RECEIVE,
};
inline constexpr std::int32_t kNumCollectives = SPARKHVD_NUM_COLLECTIVES;

/// Bytes of one element.
constexpr std::size_t element_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kUint16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kUint32:
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kUint64:
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 1;
}

/// The type of partial results: float32 for 16-bit floats, else the type itself.
constexpr DType accumulation_type(DType dtype) noexcept {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 ? DType::kFloat32 : dtype;
}

constexpr std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kUint16:
      return "uint16";
    case DType::kInt16:
      return "int16";
    case DType::kUint32:
      return "uint32";
    case DType::kInt32:
      return "int32";
    case DType::kUint64:
      return "uint64";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
  }
  return "unknown type";
}

constexpr std::string_view name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kAverage:
      return "Average";
    case ReduceOp::kSum:
      return "Sum";
    case ReduceOp::kAdasum:
      return "Adasum";
    case ReduceOp::kMin:
      return "Min";
    case ReduceOp::kMax:
      return "Max";
    case ReduceOp::kProduct:
      return "Product";
    case ReduceOp::kBitAnd:
      return "BitAnd";
    case ReduceOp::kBitOr:
      return "BitOr";
    case ReduceOp::kBitXor:
      return "BitXor";
  }
  return "unknown op";
}

constexpr std::string_view name_of(Collective collective) noexcept {
  switch (collective) {
    case Collective::kAllreduce:
      return "allreduce";
    case Collective::kAllgather:
      return "allgather";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kAlltoall:
      return "alltoall";
    case Collective::kReducescatter:
      return "reducescatter";
    case Collective::kJoin:
      return "join";
    case Collective::kAddProcessSet:
      return "add_process_set";
    case Collective::kRemoveProcessSet:
      return "remove_process_set";
    case Collective::kRegister:
      return "register_memory";
    case Collective::kConfigure:
      return "configure";
    case Collective::kAllgatherInto:
      return "allgather_into";
    case Collective::kReduce:
      return "reduce";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kSend:
      return "send";
    case Collective::kReceive:
      return "receive";
  }
  return "unknown collective";
}

/// Converts a number from the C interface or the wire; std::nullopt if it is invalid.
constexpr std::optional<DType> to_dtype(std::int64_t value) noexcept {
  if (value < 0 || value >= kNumDTypes) return std::nullopt;
  return static_cast<DType>(value);
}

constexpr std::optional<ReduceOp> to_reduce_op(std::int64_t value) noexcept {
  if (value < 0 || value >= kNumReduceOps) return std::nullopt;
  return static_cast<ReduceOp>(value);
}

constexpr std::optional<Collective> to_collective(std::int64_t value) noexcept {
  if (value < 0 || value >= kNumCollectives) return std::nullopt;
  return static_cast<Collective>(value);
}

}  // namespace sparkhvd
