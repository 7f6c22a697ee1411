#include "nccl/nccl_api.h"

#include <utility>

#include "error.h"

namespace sparkhvd::nccl {

namespace {

constexpr auto kSoname = "libnccl.so.2";
constexpr int kOldest = 21800;  // the first version with splitShare in ncclConfig_t

std::string text_of_version(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

/// Sets all function pointers and returns the names that the library lacks. It uses the plain names and not the names
/// pncclX, so that tools can intercept the calls.
std::vector<std::string> bind_all(NcclApi& api) {
  std::vector<std::string> missing;
  const auto require = [&](const char* symbol, auto*& function) {
    if (!bind(api.library, symbol, function)) missing.emplace_back(symbol);
  };
  require("ncclGetUniqueId", api.ncclGetUniqueId);
  require("ncclCommInitRankConfig", api.ncclCommInitRankConfig);
  require("ncclCommFinalize", api.ncclCommFinalize);
  require("ncclCommDestroy", api.ncclCommDestroy);
  require("ncclCommAbort", api.ncclCommAbort);
  require("ncclCommGetAsyncError", api.ncclCommGetAsyncError);
  require("ncclGetErrorString", api.ncclGetErrorString);
  require("ncclGetLastError", api.ncclGetLastError);
  require("ncclCommCount", api.ncclCommCount);
  require("ncclCommCuDevice", api.ncclCommCuDevice);
  require("ncclCommUserRank", api.ncclCommUserRank);
  require("ncclGroupStart", api.ncclGroupStart);
  require("ncclGroupEnd", api.ncclGroupEnd);
  require("ncclAllReduce", api.ncclAllReduce);
  require("ncclReduce", api.ncclReduce);
  require("ncclBroadcast", api.ncclBroadcast);
  require("ncclAllGather", api.ncclAllGather);
  require("ncclReduceScatter", api.ncclReduceScatter);
  require("ncclSend", api.ncclSend);
  require("ncclRecv", api.ncclRecv);
  bind(api.library, "ncclMemAlloc", api.ncclMemAlloc);
  bind(api.library, "ncclMemFree", api.ncclMemFree);
  bind(api.library, "ncclCommRegister", api.ncclCommRegister);
  bind(api.library, "ncclCommDeregister", api.ncclCommDeregister);
  return missing;
}

/// Binds the functions of `library`. Throws if NCCL is too old or lacks functions.
std::shared_ptr<const NcclApi> adopt(Library library) {
  auto api = std::make_shared<NcclApi>();
  api->library = std::move(library);
  const std::string& name = api->library.name();
  if (!bind(api->library, "ncclGetVersion", api->ncclGetVersion)) {
    throw Error(SPARKHVD_UNSUPPORTED, name + " is not NCCL: it has no ncclGetVersion");
  }
  api->file = api->library.file_of(reinterpret_cast<const void*>(api->ncclGetVersion));
  if (api->ncclGetVersion(&api->version) != NcclResult::kSuccess) {
    throw Error(SPARKHVD_UNSUPPORTED, api->file + " does not report its version");
  }
  // Before 2.9 version codes had four digits (2804 for 2.8.4), so they are smaller than all later codes.
  if (api->version < kOldest) {
    throw Error(SPARKHVD_UNSUPPORTED,
                api->file + " is NCCL " +
                    (api->version >= 10000 ? text_of_version(api->version)
                                           : "of version code " + std::to_string(api->version)) +
                    ", and 2.18 is the oldest that can be used");
  }
  if (const auto missing = bind_all(*api); !missing.empty()) {
    throw Error(SPARKHVD_UNSUPPORTED, api->file + " (NCCL " + text_of_version(api->version) +
                                          ") has no " + list_of(missing));
  }
  return api;
}

[[noreturn]] void throw_not_found(const std::vector<std::string>& reasons) {
  std::string text = "NCCL was not found:";
  for (const auto& reason : reasons) text += " " + reason + ";";
  text.back() = '.';
  throw Error(SPARKHVD_UNSUPPORTED,
              text +
                  " Install NCCL 2.18 or newer (a torch built for CUDA brings it, or pip install "
                  "nvidia-nccl-cu12 or -cu13), or name its file in SPARKHVD_NCCL_LIB.");
}

}  // namespace

std::shared_ptr<const NcclApi> NcclApi::load(const NcclSearch& search) {
  std::vector<std::string> reasons;
  if (!search.library.empty()) {
    try {
      return adopt(Library::open(search.library));
    } catch (const Error& error) {
      throw_not_found({error.what()});
    }
  }
  // If the process has already loaded NCCL, the engine uses only this copy, even if it is too old: two NCCLs in a
  // process need twice the GPU memory and threads.
  if (Library loaded = Library::find_loaded(kSoname)) {
    try {
      return adopt(std::move(loaded));
    } catch (const Error& error) {
      throw_not_found({std::string(error.what()) + " (this process has loaded it already)"});
    }
  }
  std::vector<std::string> names = search.candidates;
  names.emplace_back(kSoname);
  for (const auto& name : names) {
    try {
      return adopt(Library::open(name));
    } catch (const Error& error) {
      reasons.emplace_back(error.what());
    }
  }
  throw_not_found(reasons);
}

std::string NcclApi::version_text() const { return text_of_version(version); }

std::string NcclApi::describe(NcclResult result, std::string_view call, ncclComm_t comm) const {
  const char* meaning = ncclGetErrorString(result);
  std::string text = std::string(call) + " failed: " + (meaning != nullptr ? meaning : "error") +
                     " (" + std::to_string(static_cast<int>(result)) + ")";
  const char* last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  return text;
}

void NcclApi::check(NcclResult result, std::string_view call, ncclComm_t comm) const {
  if (result == NcclResult::kSuccess) return;
  throw Error(SPARKHVD_INTERNAL, describe(result, call, comm) + ".");
}

}  // namespace sparkhvd::nccl
