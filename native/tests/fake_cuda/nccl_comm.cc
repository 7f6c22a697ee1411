// Exported functions of the stand-in for libnccl.so.2: versions, errors, communicators, memory.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include "nccl_call.h"
#include "version.h"

using namespace sparkhvd::nccl;
using fake::Comm;
using fake::comm_call;
using fake::current_device;
using fake::Device;
using fake::driver;
using fake::faults;
using fake::nccl_call;
using fake::refuse;
using fake::refuse_misuse;
using fake::this_group;
using fake::While;

namespace {

using Handle = std::shared_ptr<Comm>;

struct Table {
  std::mutex mutex;
  std::map<ncclComm_t, Handle> comms;
  std::map<const void*, ncclComm_t> registered;  // by handle, the address of the memory
};

Table& table() {
  static auto* const the_table = new Table;
  return *the_table;
}

/// True if the configuration makes the communicator block; std::nullopt if the configuration is invalid.
std::optional<bool> parse(const NcclConfig* config, bool inherited) {
  if (config == nullptr) return inherited;
  constexpr std::size_t kOldestSize = 24;  // size in 2.14, where cgaClusterSize is the last field
  if (config->magic != 0xcafebeef || config->size < kOldestSize) return std::nullopt;
  const int version = fake::nccl_version();
  // Versions 2.26.2 to 2.26.6 read trafficClass from bytes that were padding before; see NcclConfig.
  if (version >= 22602 && version <= 22606 && config->version < 22602 && config->size >= 48 &&
      config->traffic_class != NcclConfig::kUnset) {
    faults().misuse("the padding of an older ncclConfig_t becomes the trafficClass");
  }
  if (config->blocking == NcclConfig::kUnset) return inherited;
  if (config->blocking != 0 && config->blocking != 1) return std::nullopt;
  return config->blocking == 1;
}

int ordinal_of(const Device& device) {
  const auto& devices = driver().devices;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].get() == &device) return static_cast<int>(i);
  }
  return -1;
}

bool has(const char* name, int since) {
  if (fake::nccl_version() >= since) return true;
  faults().misuse(std::string(name) + " in a version that has none");
  return false;
}

/// Does the second phase of a split, when all colors and keys are known: the first rank of each color makes a unique
/// id, and the other ranks of the color join with it.
NcclResult join_part(Comm& parent, int color, const Handle& child) {
  auto& meeting = *parent.meeting;
  std::pair<int, int> first{INT_MAX, INT_MAX};
  for (int i = 0; i < parent.size; ++i) {
    if (meeting.seat(i).color == color) first = std::min(first, {meeting.seat(i).key, i});
  }
  if (child != nullptr && first.second == parent.rank) {
    meeting.seat(parent.rank).id = fake::make_unique_id();
  }
  if (!meeting.barrier(parent.stop())) return NcclResult::kInternalError;
  if (child == nullptr) return NcclResult::kSuccess;
  return child->join(meeting.seat(first.second).id);
}

}  // namespace

namespace fake {

int nccl_version() {
  static const int version = [] {
    const char* text = std::getenv("FAKE_NCCL_VERSION");
    return text != nullptr ? std::atoi(text) : 22809;
  }();
  return version;
}

std::shared_ptr<Comm> find_comm(ncclComm_t handle) {
  const std::scoped_lock lock(table().mutex);
  const auto found = table().comms.find(handle);
  return found != table().comms.end() ? found->second : nullptr;
}

ncclComm_t add_comm(const Handle& comm) {
  const std::scoped_lock lock(table().mutex);
  auto* handle = reinterpret_cast<ncclComm_t>(comm.get());
  table().comms[handle] = comm;
  return handle;
}

void remove_comm(ncclComm_t handle) {
  const std::scoped_lock lock(table().mutex);
  table().comms.erase(handle);
  std::erase_if(table().registered, [&](const auto& entry) { return entry.second == handle; });
}

std::string& last_error() {
  thread_local std::string text;
  return text;
}

Group& this_group() {
  thread_local Group group;
  return group;
}

}  // namespace fake

extern "C" {

/// A version text with the word "fake". The real NCCL has its version text only as a string constant.
const char* fake_nccl_version_text() { return "NCCL version fake (a stand-in for tests)"; }

NcclResult ncclGetVersion(int* version) {
  return nccl_call("ncclGetVersion", [&] {
    *version = fake::nccl_version();
    return NcclResult::kSuccess;
  });
}

const char* ncclGetErrorString(NcclResult result) {
  switch (static_cast<int>(result)) {
    case 0:
      return "no error";
    case 1:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case 2:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case 3:
      return "internal error - please report this issue to the NCCL developers";
    case 4:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case 5:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case 6:
      return "remote process exited or there was a network error";
    case 7:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t handle) {
  if (const auto comm = fake::find_comm(handle); comm != nullptr) {
    if (const std::string text = comm->last_error(); !text.empty()) fake::last_error() = text;
  }
  return fake::last_error().c_str();
}

NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  return nccl_call("ncclGetUniqueId", [&] {
    *id = fake::make_unique_id();
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, NcclUniqueId id, int rank,
                                  NcclConfig* config) {
  return nccl_call("ncclCommInitRankConfig", [&] {
    const auto is_blocking = parse(config, true);
    if (!is_blocking) return refuse(NcclResult::kInvalidArgument, "ncclConfig_t is not valid");
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
      return refuse(NcclResult::kInvalidArgument, "Invalid rank requested");
    }
    Device* device = current_device();
    if (device == nullptr) {
      return refuse_misuse(NcclResult::kUnhandledCudaError,
                           "ncclCommInitRankConfig without a current context would take device 0");
    }
    const auto made =
        std::make_shared<Comm>(rank, num_ranks, *device, ordinal_of(*device), *is_blocking);
    *comm = fake::add_comm(made);
    auto job = [made, id] { return made->join(id); };
    if (this_group().depth > 0 && *is_blocking) {
      this_group().inits.emplace_back(made, job);
      return NcclResult::kSuccess;
    }
    const NcclResult result = made->start(job);
    if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
      refuse(result, made->last_error());
      fake::remove_comm(*comm);
      *comm = nullptr;
    }
    return result;
  });
}

NcclResult ncclCommInitRank(ncclComm_t* comm, int num_ranks, NcclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, num_ranks, id, rank, nullptr);
}

NcclResult ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* comm,
                         NcclConfig* config) {
  return comm_call("ncclCommSplit", handle, While::kReady, [&](const Handle& parent) {
    constexpr int kNoColor = -1;
    const auto is_blocking = parse(config, parent->is_blocking);
    if (!is_blocking || color < kNoColor) {
      return refuse(NcclResult::kInvalidArgument, "ncclConfig_t or the color is not valid");
    }
    *comm = nullptr;
    // This waits for the parent's ranks even in a non-blocking communicator, because rank and size are known only after
    // all ranks have published their color and key.
    if (parent->state() != NcclResult::kSuccess) return parent->state();
    parent->drain();
    auto& own = parent->meeting->seat(parent->rank);
    own.color = color;
    own.key = key;
    if (!parent->meeting->barrier(parent->stop())) return NcclResult::kInternalError;
    int size = 0;
    int rank = 0;
    for (int i = 0; i < parent->size; ++i) {
      const auto& seat = parent->meeting->seat(i);
      if (seat.color != color) continue;
      ++size;
      if (std::pair(seat.key, i) < std::pair(key, parent->rank)) ++rank;
    }
    Handle child;
    if (color != kNoColor) {
      child = std::make_shared<Comm>(rank, size, parent->device, parent->ordinal, *is_blocking);
    }
    const NcclResult result =
        parent->start([parent, color, child] { return join_part(*parent, color, child); });
    if (child != nullptr) *comm = fake::add_comm(child);
    return result;
  });
}

NcclResult ncclCommFinalize(ncclComm_t handle) {
  return comm_call("ncclCommFinalize", handle, While::kReady, [&](const Handle& comm) {
    return comm->start([comm] {
      comm->drain();
      return NcclResult::kSuccess;
    });
  });
}

NcclResult ncclCommDestroy(ncclComm_t handle) {
  return comm_call("ncclCommDestroy", handle, While::kReady, [&](const Handle& comm) {
    comm->drain();
    fake::remove_comm(handle);
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommAbort(ncclComm_t handle) {
  return comm_call("ncclCommAbort", handle, While::kInProgress, [&](const Handle& comm) {
    fake::remove_comm(handle);
    if (this_group().depth > 0) {
      this_group().aborts.push_back(comm);
      return NcclResult::kSuccess;
    }
    comm->abandon();
    // The abort frees memory, and for this a GPU first waits for all its work, including collectives of other
    // communicators. So several communicators must be aborted in one group.
    comm->device.wait_for_launches();
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommGetAsyncError(ncclComm_t handle, NcclResult* error) {
  return fake::guarded("ncclCommGetAsyncError", [&] {
    // A rule of the test sets the reported state, not the result of the call itself.
    auto forced = faults().enter("ncclCommGetAsyncError").result;
    return fake::with_comm(
        "ncclCommGetAsyncError", handle, While::kInProgress, [&](const Handle& comm) {
          if (!faults().is_idle()) {
            const auto place = "ncclCommGetAsyncError@" + std::to_string(comm->ordinal);
            if (const auto here = faults().enter(place).result) forced = here;
          }
          if (forced) {
            comm->fail(static_cast<NcclResult>(*forced), "a failure that the test asked for");
          }
          *error = comm->poll();
          return NcclResult::kSuccess;
        });
  });
}

NcclResult ncclCommRevoke(ncclComm_t handle, int) {
  if (!has("ncclCommRevoke", 22807)) return NcclResult::kInvalidUsage;
  return comm_call("ncclCommRevoke", handle, While::kInProgress, [&](const Handle& comm) {
    comm->abandon();
    comm->drain();
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommCount(ncclComm_t handle, int* count) {
  return comm_call("ncclCommCount", handle, While::kReady, [&](const Handle& comm) {
    *count = comm->size;
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommCuDevice(ncclComm_t handle, int* device) {
  return comm_call("ncclCommCuDevice", handle, While::kReady, [&](const Handle& comm) {
    *device = comm->ordinal;
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommUserRank(ncclComm_t handle, int* rank) {
  return comm_call("ncclCommUserRank", handle, While::kReady, [&](const Handle& comm) {
    *rank = comm->rank;
    return NcclResult::kSuccess;
  });
}

NcclResult ncclMemAlloc(void** memory, std::size_t bytes) {
  if (!has("ncclMemAlloc", 21901)) return NcclResult::kInvalidUsage;
  return nccl_call("ncclMemAlloc", [&] {
    Device* device = current_device();
    if (device == nullptr) {
      return refuse_misuse(NcclResult::kUnhandledCudaError,
                           "ncclMemAlloc without a current context would take device 0");
    }
    *memory = reinterpret_cast<void*>(driver().allocate(*device, bytes, true));
    return NcclResult::kSuccess;
  });
}

NcclResult ncclMemFree(void* memory) {
  if (!has("ncclMemFree", 21901)) return NcclResult::kInvalidUsage;
  return nccl_call("ncclMemFree", [&] {
    {
      const std::scoped_lock lock(table().mutex);
      if (table().registered.contains(memory)) {
        faults().misuse("ncclMemFree of memory that a communicator has registered");
      }
    }
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    const auto allocation = driver().find(address);
    if (!allocation || !allocation->can_be_registered || !driver().free(address)) {
      return refuse_misuse(NcclResult::kInvalidArgument, "ncclMemFree of what it did not give");
    }
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommRegister(ncclComm_t handle, void* memory, std::size_t bytes, void** result) {
  if (!has("ncclCommRegister", 21901)) return NcclResult::kInvalidUsage;
  return comm_call("ncclCommRegister", handle, While::kReady, [&](const Handle&) {
    const auto allocation = driver().find(reinterpret_cast<std::uint64_t>(memory), bytes);
    if (!allocation || !allocation->can_be_registered) {
      faults().misuse("ncclCommRegister of memory that is not ncclMemAlloc's");
    }
    const std::scoped_lock lock(table().mutex);
    if (!table().registered.emplace(memory, handle).second) {
      faults().misuse("ncclCommRegister of memory that is registered already");
    }
    *result = memory;
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommDeregister(ncclComm_t handle, void* registered) {
  return comm_call("ncclCommDeregister", handle, While::kReady, [&](const Handle&) {
    const std::scoped_lock lock(table().mutex);
    const auto found = table().registered.find(registered);
    if (found == table().registered.end() || found->second != handle) {
      return refuse_misuse(NcclResult::kInvalidArgument,
                           "ncclCommDeregister of what this communicator has not registered");
    }
    table().registered.erase(found);
    return NcclResult::kSuccess;
  });
}

}  // extern "C"
