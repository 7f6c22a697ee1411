// Wrong calls, abrupt ends, and failures injected into the stand-in.
#include <chrono>
#include <string>
#include <thread>

#include "nccl_conformity.h"

namespace sparkhvd::conformity {

namespace {

constexpr auto kType = NcclDataType::kFloat32;

NcclResult allreduce(Rank& rank, const Memory& memory, ncclComm_t comm, std::size_t count) {
  return rank.nccl.ncclAllReduce(memory.at(), memory.at(), count, kType, NcclOp::kSum, comm,
                                 rank.stream);
}

/// Checks that a new communicator works after a failure of another communicator.
void expect_that_a_new_communicator_works(Rank& rank) {
  Comm comm(rank);
  const Memory memory(rank, encode({4}, kType));
  comm.done(allreduce(rank, memory, comm.get(), 1), "ncclAllReduce");
  expect(memory.read() == encode({4 * rank.size}, kType), "wrong result after an abort");
  comm.destroy();
}

void identity_of_a_communicator(Rank& rank) {
  Comm comm(rank);
  int count = -1;
  int index = -1;
  int device = -1;
  rank.nccl.check(rank.nccl.ncclCommCount(comm.get(), &count), "ncclCommCount");
  rank.nccl.check(rank.nccl.ncclCommUserRank(comm.get(), &index), "ncclCommUserRank");
  rank.nccl.check(rank.nccl.ncclCommCuDevice(comm.get(), &device), "ncclCommCuDevice");
  expect(count == rank.size && index == rank.rank && device >= 0, "a communicator is not itself");
  comm.destroy();
}

void wrong_arguments_are_refused(Rank& rank) {
  Comm comm(rank);
  const Memory memory(rank, 64);
  auto* at = memory.at();
  const auto refused = [&](NcclResult result, const char* what) {
    expect(result == NcclResult::kInvalidArgument,
           std::string(what) + " answered " + std::to_string(static_cast<int>(result)));
  };
  refused(rank.nccl.ncclAllReduce(at, at, 1, static_cast<NcclDataType>(100), NcclOp::kSum,
                                  comm.get(), rank.stream),
          "a wrong type");
  refused(
      rank.nccl.ncclAllReduce(at, at, 1, kType, static_cast<NcclOp>(-1), comm.get(), rank.stream),
      "a wrong op");
  refused(rank.nccl.ncclBroadcast(at, at, 1, kType, rank.size, comm.get(), rank.stream),
          "a wrong root");
  const std::string text = rank.nccl.describe(NcclResult::kInvalidArgument, "ncclBroadcast");
  expect(text.starts_with("ncclBroadcast failed: invalid argument"), text);
}

void a_wrong_configuration_is_refused(Rank& rank) {
  NcclUniqueId id{};
  rank.nccl.check(rank.nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
  ncclComm_t comm = nullptr;
  NcclConfig config;
  config.blocking = 5;
  expect(rank.nccl.ncclCommInitRankConfig(&comm, 1, id, 0, &config) == NcclResult::kInvalidArgument,
         "blocking = 5 is taken");
  NcclConfig without_magic;
  without_magic.magic = 0;
  expect(rank.nccl.ncclCommInitRankConfig(&comm, 1, id, 0, &without_magic) ==
             NcclResult::kInvalidArgument,
         "a configuration without its magic number is taken");
}

void abort_ends_a_collective_that_waits_for_a_peer(Rank& rank) {
  {
    Comm first(rank);
    Comm second(rank);
    const Memory memory(rank, 4 * 1000);
    // The first collective of a communicator connects the ranks, and this needs all ranks.
    first.done(allreduce(rank, memory, first.get(), 1000), "ncclAllReduce");
    memory.read();
    if (rank.rank == 0) {
      first.done(allreduce(rank, memory, first.get(), 1000), "ncclAllReduce");
      expect(rank.cuda.cuStreamQuery(rank.stream) == kCudaErrorNotReady,
             "a collective ended without the other ranks");
    }
    rank.room.barrier();
    rank.nccl.check(rank.nccl.ncclGroupStart(), "ncclGroupStart");
    rank.nccl.check(rank.nccl.ncclCommAbort(first.release()), "ncclCommAbort");
    rank.nccl.check(rank.nccl.ncclCommAbort(second.release()), "ncclCommAbort");
    rank.nccl.check(rank.nccl.ncclGroupEnd(), "ncclGroupEnd");
    wait_until([&] { return rank.cuda.cuStreamQuery(rank.stream) == kCudaSuccess; },
               "the collective that was aborted");
  }
  expect_that_a_new_communicator_works(rank);
}

/// With the stand-in only: a GPU with room for both kernels may not deadlock.
void communicators_in_different_orders_deadlock(Rank& rank) {
  {
    Comm first(rank);
    Comm second(rank);
    CUstream other = nullptr;
    expect_ok(rank, rank.cuda.cuStreamCreateWithPriority(&other, kCudaStreamNonBlocking, 0),
              "cuStreamCreateWithPriority");
    const Memory memory(rank, 4 * 1000);
    memory.read();
    Comm* const order[] = {rank.rank == 0 ? &first : &second, rank.rank == 0 ? &second : &first};
    const CUstream streams[] = {rank.stream, other};
    for (int i = 0; i < 2; ++i) {
      order[i]->done(rank.nccl.ncclBroadcast(memory.at(), memory.at(), 1000, kType, 0,
                                             order[i]->get(), streams[i]),
                     "ncclBroadcast");
      // Launches the second collective when the first collective has the device.
      if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    rank.room.barrier();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (const CUstream stream : streams) {
      expect(rank.cuda.cuStreamQuery(stream) == kCudaErrorNotReady, "no deadlock");
    }
    rank.room.barrier();
    rank.nccl.check(rank.nccl.ncclGroupStart(), "ncclGroupStart");
    rank.nccl.check(rank.nccl.ncclCommAbort(first.release()), "ncclCommAbort");
    rank.nccl.check(rank.nccl.ncclCommAbort(second.release()), "ncclCommAbort");
    rank.nccl.check(rank.nccl.ncclGroupEnd(), "ncclGroupEnd");
    expect_ok(rank, rank.cuda.cuStreamSynchronize(other), "cuStreamSynchronize");
    expect_ok(rank, rank.cuda.cuStreamDestroy(other), "cuStreamDestroy");
  }
  expect_that_a_new_communicator_works(rank);
}

void abort_ends_an_initialisation_that_waits_for_a_peer(Rank& rank) {
  const NcclUniqueId id = rank.room.share(rank.rank, [&] {
    NcclUniqueId made{};
    rank.nccl.check(rank.nccl.ncclGetUniqueId(&made), "ncclGetUniqueId");
    return made;
  });
  if (rank.rank == 0) {
    NcclConfig config = non_blocking_config();
    ncclComm_t handle = nullptr;
    const NcclResult result =
        rank.nccl.ncclCommInitRankConfig(&handle, rank.size, id, rank.rank, &config);
    expect(result == NcclResult::kInProgress, "an initialisation did not wait for its peers");
    NcclResult state = NcclResult::kSuccess;
    rank.nccl.check(rank.nccl.ncclCommGetAsyncError(handle, &state), "ncclCommGetAsyncError");
    expect(state == NcclResult::kInProgress, "an initialisation ended without its peers");
    rank.nccl.check(rank.nccl.ncclCommAbort(handle), "ncclCommAbort");
  }
  rank.room.barrier();
  expect_that_a_new_communicator_works(rank);
}

void an_asynchronous_error_is_reported(Rank& rank) {
  Comm comm(rank);
  const Memory memory(rank, 4 * 1000);
  memory.read();
  comm.done(allreduce(rank, memory, comm.get(), 1000), "ncclAllReduce");
  memory.read();
  rank.room.barrier();
  if (rank.rank == 0) rank.controls.fail("ncclAllReduce@stream", 1, 6);
  rank.room.barrier();
  const NcclResult result = allreduce(rank, memory, comm.get(), 1000);
  if (result == NcclResult::kInProgress) comm.settle();
  // One rank has failed and moves no data. The other ranks wait for it until they are aborted.
  rank.room.barrier();
  wait_until(
      [&] {
        NcclResult state = NcclResult::kSuccess;
        rank.nccl.check(rank.nccl.ncclCommGetAsyncError(comm.get(), &state), "async error");
        const bool is_busy = rank.cuda.cuStreamQuery(rank.stream) == kCudaErrorNotReady;
        return state == NcclResult::kRemoteError || is_busy;
      },
      "the error");
  rank.nccl.check(rank.nccl.ncclCommAbort(comm.release()), "ncclCommAbort");
  rank.room.barrier();
  if (rank.rank == 0) rank.controls.reset();
  rank.room.barrier();
  expect_that_a_new_communicator_works(rank);
}

/// With the stand-in only: it must record these mistakes.
void misuse_is_seen(Rank& rank) {
  const auto seen = [&](const std::string& part) {
    const std::string text = rank.controls.misuse();
    expect(text.find(part) != std::string::npos, "misuse is '" + text + "', not " + part);
    rank.controls.reset();
  };
  Comm comm(rank);
  const Memory memory(rank, 4 * 4096);
  CUevent event = nullptr;
  expect_ok(rank, rank.cuda.cuEventCreate(&event, kCudaEventDisableTiming), "cuEventCreate");
  // The first launch is not done before NCCL has confirmed it.
  expect(allreduce(rank, memory, comm.get(), 8) == NcclResult::kInProgress, "done at once");
  expect_ok(rank, rank.cuda.cuEventRecord(event, rank.stream), "cuEventRecord");
  seen("cuEventRecord on a stream before");
  expect(allreduce(rank, memory, comm.get(), 8) == NcclResult::kInvalidArgument, "not refused");
  seen("ncclAllReduce before the previous");
  expect(comm.settle() == NcclResult::kSuccess, "the launch failed");
  rank.nccl.ncclAllReduce(memory.at(), memory.at(4), 8, kType, NcclOp::kSum, comm.get(),
                          rank.stream);
  seen("output over input");
  rank.nccl.ncclAllGather(memory.at(8), memory.at(), 8, kType, comm.get(), rank.stream);
  seen("output over input");
  rank.nccl.ncclAllReduce(memory.at(), memory.at(), 8, kType, static_cast<NcclOp>(4), comm.get(),
                          rank.stream);
  seen("ncclAvg");
  comm.settle();
  rank.cuda.cuEventDestroy(event);
  const ncclComm_t gone = comm.get();
  comm.destroy();
  int count = 0;
  rank.nccl.ncclCommCount(gone, &count);
  seen("that is not there");
}

}  // namespace

std::vector<Test> failure_tests() {
  return {{"identity_of_a_communicator", identity_of_a_communicator},
          {"wrong_arguments_are_refused", wrong_arguments_are_refused},
          {"a_wrong_configuration_is_refused", a_wrong_configuration_is_refused},
          {.name = "abort_ends_a_collective_that_waits_for_a_peer",
           .body = abort_ends_a_collective_that_waits_for_a_peer,
           .needs_peers = true},
          {.name = "abort_ends_an_initialisation_that_waits_for_a_peer",
           .body = abort_ends_an_initialisation_that_waits_for_a_peer,
           .needs_peers = true},
          {.name = "communicators_in_different_orders_deadlock",
           .body = communicators_in_different_orders_deadlock,
           .needs_peers = true,
           .needs_stand_in = true},
          {.name = "an_asynchronous_error_is_reported",
           .body = an_asynchronous_error_is_reported,
           .needs_peers = true,
           .needs_stand_in = true},
          {.name = "misuse_is_seen",
           .body = misuse_is_seen,
           .needs_stand_in = true,
           .is_for_one_rank = true}};
}

}  // namespace sparkhvd::conformity
