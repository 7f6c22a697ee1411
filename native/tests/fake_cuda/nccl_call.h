// Checks that every function of the stand-in for libnccl does first: rules of the test, the handle, and misuse of the
// communicator.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm.h"
#include "faults.h"

namespace fake {

using sparkhvd::nccl::ncclComm_t;

/// The communicator of a handle of the program; null for an unknown handle.
std::shared_ptr<Comm> find_comm(ncclComm_t handle);
ncclComm_t add_comm(const std::shared_ptr<Comm>& comm);
void remove_comm(ncclComm_t handle);

/// The text that ncclGetLastError returns in this thread.
std::string& last_error();
inline NcclResult refuse(NcclResult result, const std::string& text) {
  last_error() = text;
  return result;
}
inline NcclResult refuse_misuse(NcclResult result, const std::string& text) {
  faults().misuse(text);
  return refuse(result, text);
}

/// The open group of the calling thread: the work that ncclGroupEnd will do.
struct Group {
  int depth = 0;
  NcclResult error = NcclResult::kSuccess;
  std::vector<std::pair<std::shared_ptr<Comm>, std::vector<Op>>> launches;
  std::vector<std::shared_ptr<Comm>> aborts;
  std::vector<std::pair<std::shared_ptr<Comm>, std::function<NcclResult()>>> inits;
};
Group& this_group();

enum class While { kReady, kInProgress };  // states of a communicator that a call permits

/// Runs `body` after the checks that NCCL does in every call. An error ends the open group.
template <class Body>
NcclResult guarded(const char* name, Body body) noexcept {
  NcclResult result = NcclResult::kInternalError;
  try {
    result = this_thread().is_in_host_function
                 ? refuse_misuse(NcclResult::kInvalidUsage,
                                 std::string(name) + " inside a host function of a stream")
                 : body();
  } catch (const std::exception& error) {
    result = refuse(NcclResult::kSystemError, error.what());
  }
  Group& group = this_group();
  if (group.depth > 0 && result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
    group.error = result;
  }
  return result;
}

/// Runs `body` after the rules of the test and the checks that NCCL does in every call.
template <class Body>
NcclResult nccl_call(const char* name, Body body) noexcept {
  return guarded(name, [&] {
    if (const auto forced = faults().enter(name).result) {
      return refuse(static_cast<NcclResult>(*forced),
                    std::string(name) + ": a failure that the test asked for");
    }
    return body();
  });
}

/// Calls `body` with the communicator of `handle`, if it may be used now.
template <class Body>
NcclResult with_comm(const char* name, ncclComm_t handle, While state, Body body) {
  const auto comm = find_comm(handle);
  if (comm == nullptr) {
    return refuse_misuse(NcclResult::kInvalidArgument,
                         std::string(name) + " with a communicator that is not there");
  }
  struct Inside {
    explicit Inside(Comm& comm) : comm(comm), is_alone(++comm.callers == 1) {}
    ~Inside() { --comm.callers; }
    Comm& comm;
    bool is_alone;
  } inside(*comm);
  if (!inside.is_alone) {
    faults().misuse(std::string(name) + " while another thread is inside the communicator");
  }
  if (state == While::kReady && comm->state() == NcclResult::kInProgress) {
    return refuse_misuse(
        NcclResult::kInvalidArgument,
        std::string(name) + " before the previous operation of the communicator was done");
  }
  return body(comm);
}

template <class Body>
NcclResult comm_call(const char* name, ncclComm_t handle, While state, Body body) noexcept {
  return nccl_call(name, [&] { return with_comm(name, handle, state, body); });
}

}  // namespace fake
