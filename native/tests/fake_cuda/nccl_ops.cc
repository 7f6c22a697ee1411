// Exported functions of the stand-in for libnccl.so.2: groups and collectives.
#include <cstdint>
#include <thread>

#include "nccl_call.h"
#include "reduce.h"

using namespace sparkhvd::nccl;
using fake::Comm;
using fake::comm_call;
using fake::driver;
using fake::faults;
using fake::Group;
using fake::Kind;
using fake::nccl_call;
using fake::Op;
using fake::refuse;
using fake::refuse_misuse;
using fake::this_group;
using fake::While;

namespace {

using Handle = std::shared_ptr<Comm>;

struct Range {
  const std::byte* start;
  std::size_t bytes;
};

bool overlap(const Range& a, const Range& b) {
  return a.bytes > 0 && b.bytes > 0 && a.start < b.start + b.bytes && b.start < a.start + a.bytes;
}

/// True if input and output do not overlap, or overlap exactly as NCCL defines "in place".
bool is_placed_well(const Op& op, const Comm& comm) {
  const std::size_t bytes = op.count * fake::size_of(op.dtype);
  const auto ranks = static_cast<std::size_t>(comm.size);
  const std::size_t own = static_cast<std::size_t>(comm.rank) * bytes;
  switch (op.kind) {
    case Kind::kAllReduce:
      return op.send == op.recv || !overlap({op.send, bytes}, {op.recv, bytes});
    case Kind::kReduce:
    case Kind::kBroadcast:
      return comm.rank != op.root || op.send == op.recv ||
             !overlap({op.send, bytes}, {op.recv, bytes});
    case Kind::kAllGather:
      return op.send == op.recv + own || !overlap({op.send, bytes}, {op.recv, ranks * bytes});
    case Kind::kReduceScatter:
      return op.recv == op.send + own || !overlap({op.send, ranks * bytes}, {op.recv, bytes});
    case Kind::kSend:
    case Kind::kRecv:
      return true;
  }
  return true;
}

bool has_pointers(const Op& op, const Comm& comm) {
  const bool is_root = comm.rank == op.root;
  const bool reads = op.kind != Kind::kRecv && (op.kind != Kind::kBroadcast || is_root);
  const bool writes = op.kind != Kind::kSend && (op.kind != Kind::kReduce || is_root);
  return (!reads || op.send != nullptr) && (!writes || op.recv != nullptr);
}

NcclResult check(const Op& op, const Comm& comm) {
  const std::string name = fake::name_of(op.kind);
  if (fake::size_of(op.dtype) == 0) {
    return refuse(NcclResult::kInvalidArgument, name + " : invalid type");
  }
  if (static_cast<int>(op.op) >= 4) {
    return refuse_misuse(NcclResult::kInvalidArgument,
                         name + " with ncclAvg or an op of its own: the engine uses neither");
  }
  if (static_cast<int>(op.op) < 0) {
    return refuse(NcclResult::kInvalidArgument, name + " : invalid reduction operation");
  }
  if (op.root < 0 || op.root >= comm.size) {
    return refuse(NcclResult::kInvalidArgument, name + " : invalid root or peer");
  }
  if (op.count > 0 && !has_pointers(op, comm)) {
    return refuse_misuse(NcclResult::kInvalidArgument, name + " with a null pointer");
  }
  if (!is_placed_well(op, comm)) {
    faults().misuse(name + ": output over input, but not at the place that NCCL calls in place");
  }
  return NcclResult::kSuccess;
}

/// The stream of a call. The default stream is the default stream of the communicator's device.
std::shared_ptr<fake::Stream> find_stream(NcclStream handle, const Comm& comm) {
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return comm.device.legacy;
  auto stream = driver().find_stream(handle);
  return stream != nullptr && driver().device_of(stream) == &comm.device ? stream : nullptr;
}

NcclResult enqueue(Op op, const void* send, void* recv, ncclComm_t handle, NcclStream stream) {
  const char* name = fake::name_of(op.kind);
  return comm_call(name, handle, While::kReady, [&](const Handle& comm) {
    op.send = static_cast<const std::byte*>(send);
    op.recv = static_cast<std::byte*>(recv);
    if (const NcclResult result = check(op, *comm); result != NcclResult::kSuccess) return result;
    op.stream = find_stream(stream, *comm);
    if (op.stream == nullptr) {
      return refuse_misuse(NcclResult::kUnhandledCudaError,
                           std::string(name) + " on a stream that is not of the device");
    }
    if (op.stream->is_capturing) {
      return refuse_misuse(NcclResult::kInvalidUsage,
                           std::string(name) + " on a stream that is being captured");
    }
    if (op.count == 0) return comm->state();
    Group& group = this_group();
    if (group.depth == 0) {
      fake::check_confirmed(*op.stream, name);
      return comm->launch({op});
    }
    for (auto& [other, ops] : group.launches) {
      if (other != comm) continue;
      ops.push_back(op);
      return comm->state();
    }
    group.launches.push_back({comm, {op}});
    return comm->state();
  });
}

NcclResult run_inits(const Group& group) {
  std::vector<std::jthread> threads;
  for (const auto& [comm, job] : group.inits) {
    threads.emplace_back([comm = comm, job = job] { comm->start(job); });
  }
  threads.clear();  // joins them
  for (const auto& [comm, job] : group.inits) {
    if (comm->state() != NcclResult::kSuccess) return comm->state();
  }
  return NcclResult::kSuccess;
}

NcclResult end_group(const Group& group) {
  // Sets all flags first, because the end of a communicator may wait for the end of another communicator.
  for (const Handle& comm : group.aborts) comm->abandon();
  for (const Handle& comm : group.aborts) comm->device.wait_for_launches();
  if (group.error != NcclResult::kSuccess) return group.error;
  NcclResult all = run_inits(group);
  for (const auto& [comm, ops] : group.launches) {
    for (const Op& op : ops) fake::check_confirmed(*op.stream, "ncclGroupEnd");
    const NcclResult result = comm->launch(ops);
    if (result != NcclResult::kSuccess) all = result;
  }
  return all;
}

}  // namespace

extern "C" {

NcclResult ncclGroupStart() {
  return nccl_call("ncclGroupStart", [&] {
    ++this_group().depth;
    return NcclResult::kSuccess;
  });
}

NcclResult ncclGroupEnd() {
  return nccl_call("ncclGroupEnd", [&] {
    Group& group = this_group();
    if (group.depth == 0) {
      return refuse_misuse(NcclResult::kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    }
    if (--group.depth > 0) return NcclResult::kSuccess;
    return end_group(std::exchange(group, {}));
  });
}

NcclResult ncclAllReduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                         NcclOp op, ncclComm_t comm, NcclStream stream) {
  return enqueue({.kind = Kind::kAllReduce, .count = count, .dtype = dtype, .op = op}, send, recv,
                 comm, stream);
}

NcclResult ncclReduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                      NcclOp op, int root, ncclComm_t comm, NcclStream stream) {
  return enqueue({.kind = Kind::kReduce, .count = count, .dtype = dtype, .op = op, .root = root},
                 send, recv, comm, stream);
}

NcclResult ncclBroadcast(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                         int root, ncclComm_t comm, NcclStream stream) {
  return enqueue({.kind = Kind::kBroadcast, .count = count, .dtype = dtype, .root = root}, send,
                 recv, comm, stream);
}

NcclResult ncclAllGather(const void* send, void* recv, std::size_t send_count, NcclDataType dtype,
                         ncclComm_t comm, NcclStream stream) {
  return enqueue({.kind = Kind::kAllGather, .count = send_count, .dtype = dtype}, send, recv, comm,
                 stream);
}

NcclResult ncclReduceScatter(const void* send, void* recv, std::size_t recv_count,
                             NcclDataType dtype, NcclOp op, ncclComm_t comm, NcclStream stream) {
  return enqueue({.kind = Kind::kReduceScatter, .count = recv_count, .dtype = dtype, .op = op},
                 send, recv, comm, stream);
}

NcclResult ncclSend(const void* send, std::size_t count, NcclDataType dtype, int peer,
                    ncclComm_t comm, NcclStream stream) {
  return enqueue({.kind = Kind::kSend, .count = count, .dtype = dtype, .root = peer}, send, nullptr,
                 comm, stream);
}

NcclResult ncclRecv(void* recv, std::size_t count, NcclDataType dtype, int peer, ncclComm_t comm,
                    NcclStream stream) {
  return enqueue({.kind = Kind::kRecv, .count = count, .dtype = dtype, .root = peer}, nullptr, recv,
                 comm, stream);
}

NcclResult ncclRedOpCreatePreMulSum(NcclOp*, void*, NcclDataType, int, ncclComm_t) {
  return refuse_misuse(NcclResult::kInvalidUsage,
                       "ncclRedOpCreatePreMulSum: the engine must not use it");
}

}  // extern "C"
