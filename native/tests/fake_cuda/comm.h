// A communicator of the stand-in for libnccl: its state as NCCL reports it, and its launches.
//
// Threads: callers, the streams' threads that run the collectives, and a thread for each initialisation or split that
// does not block. Ownership: the table of handles and unfinished work hold a shared_ptr; `mutex_` guards the state.
// Shutdown: abort sets a flag that every wait checks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "meeting.h"
#include "nccl/nccl_api.h"

namespace fake {

using sparkhvd::nccl::NcclDataType;
using sparkhvd::nccl::NcclOp;
using sparkhvd::nccl::NcclResult;

enum class Kind : std::uint32_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv,
};

const char* name_of(Kind kind);

struct Op {
  Kind kind = Kind::kAllReduce;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::size_t count = 0;  // elements; for allgather and reducescatter per rank
  NcclDataType dtype = NcclDataType::kInt8;
  NcclOp op = NcclOp::kSum;
  int root = 0;  // for send and recv: the peer
  std::shared_ptr<Stream> stream = nullptr;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(int rank, int size, Device& device, int ordinal, bool is_blocking)
      : rank(rank), size(size), device(device), ordinal(ordinal), is_blocking(is_blocking) {}

  /// Runs `job` in the caller's thread if the communicator blocks. Otherwise a thread runs it, and calls report "in
  /// progress" meanwhile.
  NcclResult start(std::function<NcclResult()> job);
  /// Takes a seat in the memory of `id` and waits for the other ranks. start() runs it.
  NcclResult join(const sparkhvd::nccl::NcclUniqueId& id);

  /// Launches `ops` on their streams as one kernel. In a non-blocking communicator some launches happen only after a
  /// few calls of poll().
  NcclResult launch(const std::vector<Op>& ops);

  /// Continues work in progress, and returns the result of ncclCommGetAsyncError.
  NcclResult poll();
  NcclResult state();
  /// Sets a permanent error of the communicator.
  NcclResult fail(NcclResult result, const std::string& text);
  std::string last_error();

  /// Waits until all launches have ended.
  void drain();
  /// Does the first half of an abort: all work of this communicator stops at once.
  void abandon();
  Stop stop() {
    return [this] { return is_aborted.load(); };
  }

  const int rank;
  const int size;
  Device& device;
  const int ordinal;
  const bool is_blocking;
  std::atomic<bool> is_aborted = false;
  std::atomic<int> callers = 0;      // threads inside a function of this communicator
  std::shared_ptr<Meeting> meeting;  // set by join

 private:
  void enqueue(const std::vector<Op>& ops);
  void run(const std::vector<Op>& ops);

  std::mutex mutex_;
  NcclResult state_ = NcclResult::kSuccess;
  std::string last_error_;
  bool has_job_ = false;      // a thread runs a job
  int polls_left_ = 0;        // until poll() continues
  std::vector<Op> deferred_;  // a launch that poll() will do
  std::uint64_t launches_ = 0;
  std::uint64_t runs_ = 0;  // only the stream's thread uses it
  std::vector<std::pair<std::shared_ptr<Stream>, Stream::Position>> ends_;  // end of each launch
};

/// Runs collectives in their order, and sends and receives concurrently. False if the communicator was aborted. Throws
/// std::runtime_error if the ranks' calls do not match.
bool run_ops(Meeting& meeting, const std::vector<Op>& ops, const Stop& stop);

}  // namespace fake
