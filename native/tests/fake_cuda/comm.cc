#include "comm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <string_view>
#include <thread>
#include <utility>

#include "faults.h"
#include "version.h"

namespace fake {

namespace {

// Number of calls of ncclCommGetAsyncError that report "in progress" before a launch is done. With 1 call, wrong code
// that polls once and continues would seem right.
constexpr int kPolls = 3;
// Every third launch is deferred, beginning with the first launch, in which the real NCCL takes long to connect the
// ranks.
constexpr std::uint64_t kEvery = 3;

std::uint64_t host_hash() {
  if (const char* id = std::getenv("NCCL_HOSTID")) return std::hash<std::string_view>{}(id);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return std::hash<std::string>{}(id);
}

Identity identity_of(const Device& device) {
  Identity identity;
  identity.host = host_hash();
  std::memcpy(identity.gpu, device.uuid.bytes.data(), sizeof(identity.gpu));
  return identity;
}

/// The error if two ranks of `meeting` share a GPU and NCCL does not permit it; else empty.
std::string shared_gpu(const Meeting& meeting) {
  constexpr int kSharingByName = 23003;  // from this version on NCCL compares UUIDs, on any host
  const bool by_name = nccl_version() >= kSharingByName;
  const char* enable = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (by_name && enable != nullptr && std::string_view(enable) == "1") return {};
  for (int i = 0; i < meeting.size(); ++i) {
    for (int j = 0; j < i; ++j) {
      const Identity& a = meeting.seat(i).identity;
      const Identity& b = meeting.seat(j).identity;
      const bool is_same = std::equal(std::begin(a.gpu), std::end(a.gpu), std::begin(b.gpu));
      if (!is_same || (!by_name && a.host != b.host)) continue;
      return by_name ? "Multiple Ranks are using the same GPU/Partition: ranks " +
                           std::to_string(j) + " and " + std::to_string(i)
                     : "Duplicate GPU detected : rank " + std::to_string(i) + " and rank " +
                           std::to_string(j) + " both on the same CUDA device";
    }
  }
  return {};
}

}  // namespace

NcclResult Comm::start(std::function<NcclResult()> job) {
  if (is_blocking) {
    const NcclResult result = job();
    return result == NcclResult::kSuccess ? result : fail(result, last_error());
  }
  {
    const std::scoped_lock lock(mutex_);
    state_ = NcclResult::kInProgress;
    has_job_ = true;
    polls_left_ = kPolls;
  }
  std::thread([self = shared_from_this(), job = std::move(job)] {
    const NcclResult result = job();
    if (result != NcclResult::kSuccess) self->fail(result, self->last_error());
    const std::scoped_lock lock(self->mutex_);
    self->has_job_ = false;
  }).detach();
  return NcclResult::kInProgress;
}

NcclResult Comm::join(const sparkhvd::nccl::NcclUniqueId& id) {
  try {
    auto opened = std::make_shared<Meeting>(id, rank, size, identity_of(device));
    if (!opened->wait_for_all(stop())) return NcclResult::kInternalError;
    if (const std::string problem = shared_gpu(*opened); !problem.empty()) {
      return fail(NcclResult::kInvalidUsage, problem);
    }
    // No rank may continue before all ranks have read the seats.
    if (!opened->barrier(stop())) return NcclResult::kInternalError;
    const std::scoped_lock lock(mutex_);
    meeting = std::move(opened);
    return NcclResult::kSuccess;
  } catch (const std::exception& error) {
    return fail(NcclResult::kSystemError, error.what());
  }
}

NcclResult Comm::launch(const std::vector<Op>& ops) {
  // A call that returns from a hang after the abort must not launch, because the memory may be freed.
  if (is_aborted) return NcclResult::kSuccess;
  std::unique_lock lock(mutex_);
  if (state_ != NcclResult::kSuccess) return state_;
  const bool is_deferred = !is_blocking && launches_ % kEvery == 0;
  ++launches_;
  if (is_deferred) {
    for (const Op& op : ops) ++op.stream->unconfirmed;
    state_ = NcclResult::kInProgress;
    polls_left_ = kPolls;
    deferred_ = ops;
    return NcclResult::kInProgress;
  }
  lock.unlock();
  enqueue(ops);
  return NcclResult::kSuccess;
}

NcclResult Comm::poll() {
  std::unique_lock lock(mutex_);
  if (state_ != NcclResult::kInProgress) return state_;
  if (--polls_left_ > 0 || has_job_) return state_;
  state_ = NcclResult::kSuccess;
  const auto ops = std::exchange(deferred_, {});
  lock.unlock();
  if (!ops.empty()) {
    for (const Op& op : ops) --op.stream->unconfirmed;
    enqueue(ops);
  }
  return state();
}

NcclResult Comm::state() {
  const std::scoped_lock lock(mutex_);
  return state_;
}

NcclResult Comm::fail(NcclResult result, const std::string& text) {
  const std::scoped_lock lock(mutex_);
  const bool is_first =
      state_ == NcclResult::kSuccess || state_ == NcclResult::kInProgress || last_error_.empty();
  if (is_first) {
    state_ = result;
    last_error_ = text;
  }
  return result;
}

std::string Comm::last_error() {
  const std::scoped_lock lock(mutex_);
  return last_error_;
}

void Comm::drain() {
  std::unique_lock lock(mutex_);
  const auto ends = ends_;
  lock.unlock();
  for (const auto& [stream, position] : ends) stream->wait(position);
}

void Comm::abandon() {
  is_aborted = true;
  const std::scoped_lock lock(mutex_);
  for (const Op& op : std::exchange(deferred_, {})) --op.stream->unconfirmed;
}

// Queues one kernel on the first stream. It waits for the earlier items of the other streams, and they wait for it.
void Comm::enqueue(const std::vector<Op>& ops) {
  if (faults().is_idle()) return;
  const auto& first = ops.front().stream;
  for (const Op& op : ops) first->submit_wait(op.stream, op.stream->position());
  const std::uint64_t ticket = device.launch();
  const auto end = submit(first, [self = shared_from_this(), ops, ticket] {
    const std::uint64_t key = self->meeting->key() + ++self->runs_;
    if (self->device.acquire(ticket, key, self->stop())) {
      self->run(ops);
      self->device.release();
    }
    self->device.retire();
  });
  for (const Op& op : ops) op.stream->submit_wait(first, end);
  const std::scoped_lock lock(mutex_);
  std::erase_if(ends_, [&](const auto& other) { return other.first == first; });
  ends_.emplace_back(first, end);
}

void Comm::run(const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    const auto verdict = faults().enter(std::string(name_of(op.kind)) + "@stream", stop());
    if (verdict.result) {
      fail(static_cast<NcclResult>(*verdict.result), "a failure that the test asked for");
    }
  }
  // After an error this rank moves no data any more, so the peers spin until they are aborted.
  const NcclResult before = state();
  if (before != NcclResult::kSuccess && before != NcclResult::kInProgress) return;
  try {
    run_ops(*meeting, ops, stop());
  } catch (const std::exception& error) {
    faults().misuse(error.what());
    fail(NcclResult::kInternalError, error.what());
  }
}

}  // namespace fake
