// Ranks as threads, each with a simulated GPU (tests/fake_cuda): rank r opens device r.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl/cuda_api.h"
#include "world.h"

namespace sparkhvd::test {

/// The controls that the stand-in exports (fake_cuda.h).
class Fake {
 public:
  static Fake& get() {
    static Fake fake;
    return fake;
  }
  void fail(const char* function, int nth, int result) { fail_(function, nth, result); }
  void hang(const char* function, int nth) { hang_(function, nth); }
  void skip_wait(int nth) { skip_wait_(nth); }
  void delay_streams(int us) { stream_delay_us_(us); }
  int count(const char* function) { return count_(function); }
  int begin_capture(void* stream) { return begin_(reinterpret_cast<std::uint64_t>(stream)); }
  int end_capture(void* stream) { return end_(reinterpret_cast<std::uint64_t>(stream)); }
  void reset() {
    reset_();
    stream_delay_us_(0);
  }
  std::string misuse() { return misuse_(); }
  nccl::CudaApi& cuda() { return *cuda_; }

 private:
  Fake() {
    handle_ = ::dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) throw Failure(::dlerror());
    find("fake_cuda_fail", fail_);
    find("fake_cuda_hang", hang_);
    find("fake_cuda_skip_wait", skip_wait_);
    find("fake_cuda_stream_delay_us", stream_delay_us_);
    find("fake_cuda_count", count_);
    find("fake_cuda_reset", reset_);
    find("fake_cuda_misuse", misuse_);
    find("fake_cuda_begin_capture", begin_);
    find("fake_cuda_end_capture", end_);
    cuda_ = std::const_pointer_cast<nccl::CudaApi>(nccl::CudaApi::load(FAKE_CUDA_LIBRARY));
  }
  template <class Function>
  void find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(handle_, name));
    if (function == nullptr) throw Failure(std::string("no ") + name);
  }

  void* handle_ = nullptr;
  void (*fail_)(const char*, int, int) = nullptr;
  void (*hang_)(const char*, int) = nullptr;
  void (*skip_wait_)(int) = nullptr;
  void (*stream_delay_us_)(int) = nullptr;
  int (*count_)(const char*) = nullptr;
  void (*reset_)() = nullptr;
  const char* (*misuse_)() = nullptr;
  int (*begin_)(std::uint64_t) = nullptr;
  int (*end_)(std::uint64_t) = nullptr;
  std::shared_ptr<nccl::CudaApi> cuda_;
};

inline Status open_device(TestEngine& engine, std::int32_t ordinal) {
  sparkhvd_device_options options{};
  options.struct_size = sizeof(options);
  options.device = ordinal;
  options.cuda_library = FAKE_CUDA_LIBRARY;
  options.nccl_library = FAKE_NCCL_LIBRARY;
  char text[4096] = "";
  const auto code = sparkhvd_device_open(engine.get(), &options, text, sizeof(text));
  return {code, text};
}

/// The GPU as a rank's program uses it: a stream, memory, copies.
class Gpu {
 public:
  Gpu(TestEngine& engine, std::int32_t rank) : Gpu(rank) {
    CHECK_EQUAL(open_device(engine, rank).message, "");
  }
  explicit Gpu(std::int32_t ordinal) : ordinal_(ordinal) {
    nccl::CUdevice device = 0;
    cuda().check(cuda().cuInit(0), "cuInit");
    cuda().check(cuda().cuDeviceGet(&device, ordinal), "cuDeviceGet");
    cuda().check(cuda().cuDevicePrimaryCtxRetain(&context_, device), "retain");
    device_ = device;
    const nccl::CurrentContext current(cuda(), context_);
    cuda().check(cuda().cuStreamCreateWithPriority(&stream_, nccl::kCudaStreamNonBlocking, 0),
                 "cuStreamCreateWithPriority");
  }
  Gpu(const Gpu&) = delete;
  ~Gpu() {
    const nccl::CurrentContext current(cuda(), context_);
    cuda().cuStreamSynchronize(stream_);
    for (const auto address : memory_) cuda().cuMemFree(address);
    cuda().cuStreamDestroy(stream_);
    cuda().cuDevicePrimaryCtxRelease(device_);
  }

  nccl::CudaApi& cuda() { return Fake::get().cuda(); }
  std::int32_t ordinal() const { return ordinal_; }
  nccl::CUstream stream() const { return stream_; }

  std::byte* allocate(std::size_t bytes) {
    const nccl::CurrentContext current(cuda(), context_);
    nccl::CUdeviceptr address = 0;
    cuda().check(cuda().cuMemAlloc(&address, std::max<std::size_t>(bytes, 1)), "cuMemAlloc");
    memory_.push_back(address);
    return reinterpret_cast<std::byte*>(address);
  }
  /// Copies `data` to the device, on the stream. `data` must live until the stream is synchronized.
  void write(std::byte* to, const void* data, std::size_t bytes) {
    const nccl::CurrentContext current(cuda(), context_);
    if (bytes == 0) return;
    cuda().check(
        cuda().cuMemcpyHtoDAsync(reinterpret_cast<nccl::CUdeviceptr>(to), data, bytes, stream_),
        "cuMemcpyHtoDAsync");
  }
  void read(void* to, const std::byte* from, std::size_t bytes) {
    const nccl::CurrentContext current(cuda(), context_);
    if (bytes == 0) return;
    cuda().check(
        cuda().cuMemcpyDtoHAsync(to, reinterpret_cast<nccl::CUdeviceptr>(from), bytes, stream_),
        "cuMemcpyDtoHAsync");
  }
  void synchronize() {
    const nccl::CurrentContext current(cuda(), context_);
    cuda().check(cuda().cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }
  /// Makes a request run on this device, after the pending work of its stream.
  sparkhvd_request& use(Request& request) {
    auto& raw = request.raw();
    raw.device = ordinal_;
    raw.stream = reinterpret_cast<std::uint64_t>(stream_);
    return raw;
  }
  Status wait_stream(const TestWork& work, std::uint32_t timeout_ms = 20000) {
    char text[4096] = "";
    const auto code = sparkhvd_wait_stream(work.get(), reinterpret_cast<std::uint64_t>(stream_),
                                           timeout_ms, text, sizeof(text));
    return {code, text};
  }

 private:
  std::int32_t ordinal_;
  nccl::CUdevice device_ = 0;
  nccl::CUcontext context_ = nullptr;
  nccl::CUstream stream_ = nullptr;
  std::vector<nccl::CUdeviceptr> memory_;
};

using Floats = std::vector<float>;
using Ranks = std::vector<std::int64_t>;

/// An allreduce of floats on the device, from its stream to the result in host memory.
struct Sum {
  Sum(Gpu& the_gpu, Floats data) : gpu(the_gpu), host(std::move(data)) {
    memory = gpu.allocate(host.size() * sizeof(float));
    gpu.write(memory, host.data(), host.size() * sizeof(float));
  }
  TestWork start(TestEngine& engine, const std::string& name, std::int32_t process_set = 0,
                 Status* status = nullptr) {
    Request request(SPARKHVD_ALLREDUCE, name);
    request.tensor(memory, memory, {static_cast<std::int64_t>(host.size())}).on(process_set);
    return engine.submit(gpu.use(request), status);
  }
  const Floats& result() {
    gpu.read(host.data(), memory, host.size() * sizeof(float));
    gpu.synchronize();
    return host;
  }
  Gpu& gpu;
  Floats host;
  std::byte* memory;
};

inline std::int32_t add_process_set(TestEngine& engine, const Ranks& ranks) {
  Request request(SPARKHVD_ADD_PROCESS_SET, "add");
  TestWork work = engine.submit(request.numbers(ranks).raw());
  CHECK_EQUAL(work.wait().message, "");
  return static_cast<std::int32_t>(result_of(work).rows.at(0));
}

inline WorldOptions world(std::vector<std::int32_t> hosts) {
  WorldOptions options;
  options.hosts = std::move(hosts);
  return options;
}

/// Resets the stand-in before and after a test. `check` fails the test if the stand-in has recorded a misuse.
struct FakeScope {
  FakeScope() { Fake::get().reset(); }
  ~FakeScope() { Fake::get().reset(); }
  FakeScope(const FakeScope&) = delete;
  void check() { CHECK_EQUAL(Fake::get().misuse(), ""); }
};

}  // namespace sparkhvd::test
