// A communicator of the stand-in for libnccl: its state as NCCL shows it, and its launches.
//
// Threads: callers, the stream's threads that run the collectives, and one for each initialisation
// or split that does not block. Ownership: the table of handles and everything under way hold a
// shared_ptr; `mutex_` guards the state. Shutdown: abort sets a flag that every wait looks at.
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
  std::size_t count = 0;  // of elements; per rank for allgather and reducescatter
  NcclDataType dtype = NcclDataType::kInt8;
  NcclOp op = NcclOp::kSum;
  int root = 0;  // the peer of send and recv
  std::shared_ptr<Stream> stream = nullptr;
};

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(int rank, int size, Device& device, int ordinal, bool is_blocking)
      : rank(rank), size(size), device(device), ordinal(ordinal), is_blocking(is_blocking) {}

  /// Runs `job` here if the communicator blocks, else in a thread while calls say "in progress".
  NcclResult start(std::function<NcclResult()> job);
  /// The seat in the memory of `id`, and the wait for the others; to be run by start().
  NcclResult join(const sparkhvd::nccl::NcclUniqueId& id);

  /// Launches on the streams of `ops` as one kernel; without blocking, now and then only when
  /// poll() has been called a few times.
  NcclResult launch(const std::vector<Op>& ops);

  /// Result of ncclCommGetAsyncError; continues work in progress.
  NcclResult poll();
  NcclResult state();
  /// An error of the communicator, which stays.
  NcclResult fail(NcclResult result, const std::string& text);
  std::string last_error();

  /// Waits until what was launched has ended.
  void drain();
  /// The first half of an abort: everything of this communicator ends where it is.
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
  bool has_job_ = false;      // a thread works
  int polls_left_ = 0;        // until poll() continues
  std::vector<Op> deferred_;  // a launch that poll() does
  std::uint64_t launches_ = 0;
  std::uint64_t runs_ = 0;  // of the stream's thread alone
  std::vector<std::pair<std::shared_ptr<Stream>, Stream::Position>> ends_;  // of each stream
};

/// Runs the collectives in their order and the sends and receives beside each other. False where
/// the communicator was aborted; throws std::runtime_error where the ranks do not match.
bool run_ops(Meeting& meeting, const std::vector<Op>& ops, const Stop& stop);

}  // namespace fake
