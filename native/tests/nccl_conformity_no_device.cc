// Checks of a libnccl on a machine without a GPU: its version, its exported functions, its unique ids, the layout of
// its configuration, and its error if there is no GPU.
#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "nccl_conformity.h"

namespace sparkhvd::conformity {

namespace {

struct Since {
  const char* symbol;
  int version;
};

/// The release in which each function first appeared, from the headers of all releases. 21901 means 2.19.1.
constexpr Since kSymbols[] = {
    {"ncclCommInitRank", 20800},
    {"ncclCommInitRankConfig", 21400},
    {"ncclCommFinalize", 21400},
    {"ncclRedOpCreatePreMulSum", 21100},
    {"ncclCommSplit", 21801},
    {"ncclMemAlloc", 21901},
    {"ncclMemFree", 21901},
    {"ncclCommRegister", 21901},
    {"ncclCommDeregister", 21901},
    {"ncclGroupSimulateEnd", 22203},
    {"ncclCommInitRankScalable", 22304},
    {"ncclCommShrink", 22703},
    {"ncclCommWindowRegister", 22703},
    {"ncclCommWindowDeregister", 22703},
    {"ncclAlltoAll", 22803},
    {"ncclGather", 22803},
    {"ncclScatter", 22803},
    {"ncclCommRevoke", 22807},
    {"ncclCommGrow", 22902},
    {"ncclCommGetUniqueId", 22902},
    {"ncclPutSignal", 22902},
    {"ncclSignal", 22902},
    {"ncclWaitSignal", 22902},
    {"ncclCommSuspend", 22907},
    {"ncclCommResume", 22907},
    {"ncclAllReduceConfig", 23102},
    {"ncclSetEncryption", 23203},
};

void check_symbols(const NcclApi& nccl) {
  for (const auto& [symbol, since] : kSymbols) {
    const bool is_there = nccl.library.find(symbol) != nullptr;
    expect(is_there == (nccl.version >= since),
           std::string(symbol) + (is_there ? " is there before its release" : " is missing"));
  }
}

void check_unique_ids(const NcclApi& nccl) {
  NcclUniqueId first{};
  NcclUniqueId second{};
  nccl.check(nccl.ncclGetUniqueId(&first), "ncclGetUniqueId");
  nccl.check(nccl.ncclGetUniqueId(&second), "ncclGetUniqueId");
  expect(first.bytes != second.bytes, "two unique ids are the same");
  expect(first.bytes != NcclUniqueId{}.bytes, "a unique id is zeros");
}

/// Tries to create a communicator, and returns the error. The error must not be an invalid argument, because then our
/// configuration would be wrong.
std::string init_without_device(const NcclApi& nccl) {
  NcclUniqueId id{};
  nccl.check(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
  NcclConfig config = non_blocking_config();
  ncclComm_t comm = nullptr;
  NcclResult result = nccl.ncclCommInitRankConfig(&comm, 1, id, 0, &config);
  if (result == NcclResult::kInProgress) {
    wait_until(
        [&] {
          nccl.check(nccl.ncclCommGetAsyncError(comm, &result), "ncclCommGetAsyncError");
          return result != NcclResult::kInProgress;
        },
        "ncclCommInitRankConfig");
  }
  expect(result != NcclResult::kSuccess, "there is a GPU: run the suite without --no-device");
  const std::string text = nccl.describe(result, "ncclCommInitRankConfig");
  expect(result == NcclResult::kUnhandledCudaError || result == NcclResult::kSystemError, text);
  return text;
}

}  // namespace

int check_without_device(const NcclSearch& search) {
  const auto nccl = NcclApi::load(search);
  std::printf("version %d\nfile %s\n", nccl->version, nccl->file.c_str());
  check_symbols(*nccl);
  std::printf("symbols %zu\n", std::size(kSymbols));
  check_unique_ids(*nccl);
  std::printf("unique ids differ\n");
  std::printf("without a GPU: %s\n", init_without_device(*nccl).c_str());
  return 0;
}

}  // namespace sparkhvd::conformity
