// Helpers of the conformity suite: a rank with its GPU, and memory through which ranks meet.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nccl/cuda_api.h"
#include "nccl/nccl_api.h"

namespace sparkhvd::conformity {

using namespace sparkhvd::nccl;

/// Memory that all ranks share, as threads or processes. Its waits end with the first failure of a rank.
class Room {
 public:
  explicit Room(int size);
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room();

  void barrier();
  NcclUniqueId share(int rank, const std::function<NcclUniqueId()>& make);
  void fail();
  bool has_failed() const;

 private:
  struct Shared;
  int size_;
  Shared* shared_;
};

/// Controls of the stand-in; null with the real libraries.
struct Controls {
  void (*fail)(const char* function, int nth, int result) = nullptr;
  void (*hang)(const char* function, int nth) = nullptr;
  void (*skip_wait)(int nth) = nullptr;
  void (*stream_delay_us)(int us) = nullptr;
  void (*reset)() = nullptr;
  const char* (*misuse)() = nullptr;
  int (*begin_capture)(std::uint64_t stream) = nullptr;
  int (*end_capture)(std::uint64_t stream) = nullptr;

  explicit operator bool() const { return fail != nullptr; }
};

struct Rank {
  const CudaApi& cuda;
  const NcclApi& nccl;
  const Controls& controls;
  Room& room;
  int rank;
  int size;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
};

/// Throws std::runtime_error with `what` unless the condition holds.
void expect(bool condition, const std::string& what);
void expect_ok(const Rank& rank, CUresult result, const char* call);
void wait_until(const std::function<bool()>& condition, const std::string& what);

/// A non-blocking communicator. The destructor aborts it, unless it was destroyed before.
class Comm {
 public:
  /// All ranks of `room` must call it.
  explicit Comm(Rank& rank);
  Comm(Rank& rank, ncclComm_t handle) : rank_(rank), handle_(handle) {}
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  ~Comm();

  ncclComm_t get() const { return handle_; }
  /// Polls until the communicator has finished `call`, and expects success. `result`: what `call` has returned.
  void done(NcclResult result, const char* call);
  /// Polls until nothing is in progress, and returns the state that ncclCommGetAsyncError reports.
  NcclResult settle();
  ncclComm_t release() { return std::exchange(handle_, nullptr); }
  void destroy();

 private:
  Rank& rank_;
  ncclComm_t handle_ = nullptr;
};

/// Memory on the device. The destructor frees it after the work of the stream.
class Memory {
 public:
  Memory(Rank& rank, std::vector<std::byte> content);
  Memory(Rank& rank, std::size_t bytes) : Memory(rank, std::vector<std::byte>(bytes)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  std::byte* at(std::size_t offset = 0) const {
    return reinterpret_cast<std::byte*>(address_ + offset);
  }
  CUdeviceptr address() const { return address_; }
  /// The content after all work on the rank's stream.
  std::vector<std::byte> read() const;

 private:
  Rank& rank_;
  std::size_t bytes_;
  CUdeviceptr address_ = 0;
};

inline constexpr NcclDataType kDTypes[] = {
    NcclDataType::kInt8,    NcclDataType::kUint8,   NcclDataType::kInt32,   NcclDataType::kUint32,
    NcclDataType::kInt64,   NcclDataType::kUint64,  NcclDataType::kFloat16, NcclDataType::kFloat32,
    NcclDataType::kFloat64, NcclDataType::kBfloat16};
inline constexpr NcclOp kOps[] = {NcclOp::kSum, NcclOp::kProduct, NcclOp::kMax, NcclOp::kMin};

std::size_t size_of(NcclDataType dtype);
/// Encodes whole numbers from 0 to 127, which every type represents exactly.
std::vector<std::byte> encode(const std::vector<int>& values, NcclDataType dtype);

struct Test {
  const char* name;
  std::function<void(Rank&)> body;
  bool needs_peers = false;
  bool needs_stand_in = false;
  bool is_for_one_rank = false;
  bool races = false;  // it has a data race on purpose, so it is skipped under ThreadSanitizer
};
std::vector<Test> collective_tests();
std::vector<Test> device_tests();
std::vector<Test> failure_tests();

/// Checks libnccl on a machine without a GPU, and prints the results. Returns the exit status.
int check_without_device(const NcclSearch& search);

}  // namespace sparkhvd::conformity
