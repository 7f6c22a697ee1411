// The functions of libnccl.so.2 that the engine calls, found at run time, and the parts of nccl.h that they need. This
// file knows versions 2.18 to 2.32. The engine also accepts newer versions, because NCCL only adds to its interface.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nccl/library.h"

namespace sparkhvd::nccl {

using ncclComm_t = struct ncclComm*;
using NcclStream = struct CUstream_st*;

/// Results of NCCL. Later versions have more results; all of them are errors (8 is a timeout since 2.30).
enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class NcclDataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

/// Reductions of NCCL, without Avg (4): for floats it turns off NVLink SHARP.
enum class NcclOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3 };

struct NcclUniqueId {
  std::array<char, 128> bytes;
};

/// ncclConfig_t up to 2.32. NCCL reads the first `size` bytes, and only fields that `version` had. So `size` is the end
/// of the last field that is set, and `version` is the version that added this field.
struct NcclConfig {
  static constexpr int kUnset = INT_MIN;

  /// 44, although sizeof was 48 in 2.18: bytes 44 to 47 were padding in 2.18, but 2.26.2 to 2.26.6 read them as
  /// trafficClass without checking `version`.
  std::size_t size = 44;
  std::uint32_t magic = 0xcafebeef;
  std::uint32_t version = 21800;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;       // 2.26
  const char* comm_name = nullptr;  // 2.27, with the next four fields
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
  int channels_per_net_peer = kUnset;  // 2.28
  int nvlink_centric_sched = kUnset;
  int graph_usage_mode = kUnset;  // 2.29
  int num_rma_ctx = kUnset;
  int max_p2p_peers = kUnset;          // 2.30.3
  int graph_stream_ordering = kUnset;  // 2.30.5
  int launch_order_implicit = kUnset;  // 2.31, with the next three fields
  int num_rma_sig = kUnset;
  int rma_eager_init = kUnset;
  int host_cft_mode = kUnset;
  int nvls_host_mode = kUnset;  // 2.32
};

// Offsets that gcc computed from the headers of 2.14 to 2.32.
static_assert(offsetof(NcclConfig, size) == 0);
static_assert(offsetof(NcclConfig, magic) == 8);
static_assert(offsetof(NcclConfig, version) == 12);
static_assert(offsetof(NcclConfig, blocking) == 16);
static_assert(offsetof(NcclConfig, cga_cluster_size) == 20);
static_assert(offsetof(NcclConfig, min_ctas) == 24);
static_assert(offsetof(NcclConfig, max_ctas) == 28);
static_assert(offsetof(NcclConfig, net_name) == 32);
static_assert(offsetof(NcclConfig, split_share) == 40);
static_assert(offsetof(NcclConfig, traffic_class) == 44);
static_assert(offsetof(NcclConfig, comm_name) == 48);
static_assert(offsetof(NcclConfig, collnet_enable) == 56);
static_assert(offsetof(NcclConfig, cta_policy) == 60);
static_assert(offsetof(NcclConfig, shrink_share) == 64);
static_assert(offsetof(NcclConfig, nvls_ctas) == 68);
static_assert(offsetof(NcclConfig, channels_per_net_peer) == 72);
static_assert(offsetof(NcclConfig, nvlink_centric_sched) == 76);
static_assert(offsetof(NcclConfig, graph_usage_mode) == 80);
static_assert(offsetof(NcclConfig, num_rma_ctx) == 84);
static_assert(offsetof(NcclConfig, max_p2p_peers) == 88);
static_assert(offsetof(NcclConfig, graph_stream_ordering) == 92);
static_assert(offsetof(NcclConfig, launch_order_implicit) == 96);
static_assert(offsetof(NcclConfig, num_rma_sig) == 100);
static_assert(offsetof(NcclConfig, rma_eager_init) == 104);
static_assert(offsetof(NcclConfig, host_cft_mode) == 108);
static_assert(offsetof(NcclConfig, nvls_host_mode) == 112);
static_assert(sizeof(NcclConfig) == 120);
static_assert(sizeof(NcclUniqueId) == 128);

/// Configuration of a communicator with non-blocking calls, for 2.18 and later.
inline NcclConfig non_blocking_config() {
  NcclConfig config;
  config.blocking = 0;
  return config;
}

/// Paths in which to look for libnccl.
struct NcclSearch {
  /// The only path to try. If it is empty, the engine tries the copy that the process has loaded, then the candidates,
  /// then the loader's libnccl.so.2.
  std::string library;
  std::vector<std::string> candidates;
};

struct NcclApi {
  NcclResult (*ncclGetVersion)(int* version) = nullptr;
  NcclResult (*ncclGetUniqueId)(NcclUniqueId*) = nullptr;
  NcclResult (*ncclCommInitRankConfig)(ncclComm_t*, int num_ranks, NcclUniqueId, int rank,
                                       NcclConfig*) = nullptr;
  NcclResult (*ncclCommFinalize)(ncclComm_t) = nullptr;
  NcclResult (*ncclCommDestroy)(ncclComm_t) = nullptr;
  NcclResult (*ncclCommAbort)(ncclComm_t) = nullptr;
  NcclResult (*ncclCommGetAsyncError)(ncclComm_t, NcclResult*) = nullptr;
  const char* (*ncclGetErrorString)(NcclResult) = nullptr;
  const char* (*ncclGetLastError)(ncclComm_t) = nullptr;
  NcclResult (*ncclCommCount)(ncclComm_t, int* count) = nullptr;
  NcclResult (*ncclCommCuDevice)(ncclComm_t, int* device) = nullptr;
  NcclResult (*ncclCommUserRank)(ncclComm_t, int* rank) = nullptr;
  NcclResult (*ncclGroupStart)() = nullptr;
  NcclResult (*ncclGroupEnd)() = nullptr;

  NcclResult (*ncclAllReduce)(const void* send, void* recv, std::size_t count, NcclDataType, NcclOp,
                              ncclComm_t, NcclStream) = nullptr;
  NcclResult (*ncclReduce)(const void* send, void* recv, std::size_t count, NcclDataType, NcclOp,
                           int root, ncclComm_t, NcclStream) = nullptr;
  NcclResult (*ncclBroadcast)(const void* send, void* recv, std::size_t count, NcclDataType,
                              int root, ncclComm_t, NcclStream) = nullptr;
  /// `send_count` is per rank. In place if send == recv + rank * send_count.
  NcclResult (*ncclAllGather)(const void* send, void* recv, std::size_t send_count, NcclDataType,
                              ncclComm_t, NcclStream) = nullptr;
  /// `recv_count` is per rank. In place if recv == send + rank * recv_count.
  NcclResult (*ncclReduceScatter)(const void* send, void* recv, std::size_t recv_count,
                                  NcclDataType, NcclOp, ncclComm_t, NcclStream) = nullptr;
  NcclResult (*ncclSend)(const void* send, std::size_t count, NcclDataType, int peer, ncclComm_t,
                         NcclStream) = nullptr;
  NcclResult (*ncclRecv)(void* recv, std::size_t count, NcclDataType, int peer, ncclComm_t,
                         NcclStream) = nullptr;

  // These functions are null if the version lacks them.
  NcclResult (*ncclMemAlloc)(void** memory, std::size_t bytes) = nullptr;  // 2.19
  NcclResult (*ncclMemFree)(void* memory) = nullptr;                       // 2.19
  NcclResult (*ncclCommRegister)(ncclComm_t, void* memory, std::size_t bytes,
                                 void** handle) = nullptr;               // 2.19
  NcclResult (*ncclCommDeregister)(ncclComm_t, void* handle) = nullptr;  // 2.19

  /// Loads libnccl. Throws Error(SPARKHVD_UNSUPPORTED) with every path that it tried and the reason of its failure.
  static std::shared_ptr<const NcclApi> load(const NcclSearch& search = {});

  /// The version as text: "2.28.9".
  std::string version_text() const;

  /// Text of a failed call: "ncclAllReduce failed: unhandled cuda error (1): <NCCL's last error>". `comm` may be null.
  std::string describe(NcclResult result, std::string_view call, ncclComm_t comm = nullptr) const;

  /// Throws Error(SPARKHVD_INTERNAL) unless `result` is success. It also throws for "in progress".
  void check(NcclResult result, std::string_view call, ncclComm_t comm = nullptr) const;

  Library library;
  int version = 0;   // NCCL's version code: 22809 is 2.28.9
  std::string file;  // path of the library
};

}  // namespace sparkhvd::nccl
