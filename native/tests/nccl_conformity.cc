// Runs the conformity suite of CUDA and NCCL through the engine's own function tables.
//
//   nccl_conformity --ranks 2                              with the stand-ins; ranks are threads
//   nccl_conformity --ranks 2 --processes                  with the stand-ins; ranks are processes
//   nccl_conformity --cuda-library libcuda.so.1 --nccl-library <libnccl.so.2> --ranks 1
//   ... --ranks 2 --processes --same-gpu                   two ranks on the only GPU of a machine
//   nccl_conformity --no-device --nccl-library <path>      the checks that need no GPU
//   ... --nccl-candidate <path> --loaded <path>            searches the library, as the engine does
//   ... <words>                                            only tests with one of the words in their name
//   ... --without <name>                                   all tests except this test
#include "nccl_conformity.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string_view>
#include <thread>
#include <utility>

namespace sparkhvd::conformity {

namespace {

// Limit for all tests together. SIGALRM then ends the process, because failures of this suite are often hangs.
constexpr unsigned kDeadlineS = 240;
// When the process of a rank has ended, the other ranks have this time to end by themselves.
constexpr unsigned kGraceS = 2;

#ifdef __SANITIZE_THREAD__
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
#endif

struct Options {
  std::string cuda_library = FAKE_CUDA_LIBRARY;
  NcclSearch nccl = {.library = FAKE_NCCL_LIBRARY, .candidates = {}};
  std::string loaded;  // a library that is opened before the search
  int ranks = 2;
  bool has_processes = false;
  bool has_one_gpu = false;
  bool has_device = true;
  std::vector<std::string> words;
  std::vector<std::string> left_out;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value = [&]() -> const char* {
      if (i + 1 == argc) throw std::runtime_error(std::string(word) + " needs a value");
      return argv[++i];
    };
    if (word == "--cuda-library") {
      options.cuda_library = value();
    } else if (word == "--nccl-library") {
      options.nccl.library = value();
    } else if (word == "--nccl-candidate") {
      options.nccl.library.clear();
      options.nccl.candidates.emplace_back(value());
    } else if (word == "--loaded") {
      options.loaded = value();
    } else if (word == "--ranks") {
      options.ranks = std::atoi(value());
    } else if (word == "--processes") {
      options.has_processes = true;
    } else if (word == "--same-gpu") {
      options.has_one_gpu = true;
    } else if (word == "--no-device") {
      options.has_device = false;
    } else if (word == "--without") {
      options.left_out.emplace_back(value());
    } else if (word.starts_with("--")) {
      throw std::runtime_error("no option is called " + std::string(word));
    } else {
      options.words.emplace_back(word);
    }
  }
  return options;
}

/// Permits two ranks on one GPU. Up to 2.29 they pretend to be on two hosts; since 2.30 a variable permits it.
void share_gpu(int rank) {
  ::setenv("NCCL_HOSTID", ("conformity-" + std::to_string(rank)).c_str(), 1);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  ::setenv("NCCL_IB_DISABLE", "1", 1);
}

Controls find_controls(const Library& library) {
  Controls controls;
  bind(library, "fake_cuda_fail", controls.fail);
  bind(library, "fake_cuda_hang", controls.hang);
  bind(library, "fake_cuda_skip_wait", controls.skip_wait);
  bind(library, "fake_cuda_stream_delay_us", controls.stream_delay_us);
  bind(library, "fake_cuda_reset", controls.reset);
  bind(library, "fake_cuda_misuse", controls.misuse);
  bind(library, "fake_cuda_begin_capture", controls.begin_capture);
  bind(library, "fake_cuda_end_capture", controls.end_capture);
  return controls;
}

std::vector<Test> chosen(const Options& options, const Controls& controls) {
  std::vector<Test> tests;
  for (const auto& some : {collective_tests(), device_tests(), failure_tests()}) {
    for (const Test& test : some) {
      const bool is_wanted =
          options.words.empty() || std::ranges::any_of(options.words, [&](const auto& word) {
            return std::string_view(test.name).find(word) != std::string_view::npos;
          });
      const bool is_left_out = std::ranges::any_of(
          options.left_out, [&](const auto& name) { return name == test.name; });
      const bool can_run =
          (!test.needs_peers || options.ranks > 1) && (!test.needs_stand_in || controls) &&
          (!test.is_for_one_rank || options.ranks == 1) && (!test.races || !kFindsRaces);
      if (is_wanted && !is_left_out && can_run) tests.push_back(test);
    }
  }
  return tests;
}

/// All tests of one rank; returns how many passed, or -1 after the first failure.
int run_rank(const Options& options, const CudaApi& cuda, const NcclApi& nccl,
             const Controls& controls, Room& room, int index) {
  Rank rank{cuda, nccl, controls, room, index, options.ranks};
  const int device = options.has_one_gpu ? 0 : index;
  std::string at = "start";
  int passed = 0;
  try {
    expect_ok(rank, cuda.cuDevicePrimaryCtxRetain(&rank.context, device), "primary context");
    const CurrentContext current(cuda, rank.context);
    expect_ok(rank, cuda.cuStreamCreateWithPriority(&rank.stream, kCudaStreamNonBlocking, 0),
              "cuStreamCreateWithPriority");
    for (const Test& test : chosen(options, controls)) {
      at = test.name;
      const auto start = std::chrono::steady_clock::now();
      room.barrier();
      test.body(rank);
      room.barrier();
      if (controls) expect(*controls.misuse() == '\0', std::string("misuse: ") + controls.misuse());
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (index == 0) std::printf("ok      %6.2f s  %s\n", took.count(), test.name);
      std::fflush(stdout);
      ++passed;
    }
    expect_ok(rank, cuda.cuStreamDestroy(rank.stream), "cuStreamDestroy");
    expect_ok(rank, cuda.cuDevicePrimaryCtxRelease(device), "cuDevicePrimaryCtxRelease");
    return passed;
  } catch (const std::exception& error) {
    std::printf("FAILED  rank %d of %d, %s\n        %s\n", index, options.ranks, at.c_str(),
                error.what());
    std::fflush(stdout);
    room.fail();
    return -1;
  }
}

int run_threads(const Options& options, Room& room) {
  const auto cuda = CudaApi::load(options.cuda_library);
  const auto nccl = NcclApi::load(options.nccl);
  const Controls controls = find_controls(cuda->library);
  std::printf("%d ranks in threads, NCCL %s%s\n", options.ranks, nccl->version_text().c_str(),
              controls ? " (fake)" : "");
  std::vector<int> passed(static_cast<std::size_t>(options.ranks));
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < options.ranks; ++i) {
      threads.emplace_back([&, i] {
        passed[static_cast<std::size_t>(i)] = run_rank(options, *cuda, *nccl, controls, room, i);
      });
    }
  }
  std::printf("%d tests passed\n", std::max(0, passed[0]));
  return std::ranges::min(passed) > 0 ? 0 : 1;
}

int run_process(const Options& options, Room& room, int index) {
  ::alarm(kDeadlineS);
  try {
    if (options.has_one_gpu) share_gpu(index);
    const auto cuda = CudaApi::load(options.cuda_library);
    const auto nccl = NcclApi::load(options.nccl);
    const Controls controls = find_controls(cuda->library);
    if (index == 0) {
      std::printf("%d ranks in processes, NCCL %s%s\n", options.ranks, nccl->version_text().c_str(),
                  controls ? " (fake)" : "");
    }
    const int passed = run_rank(options, *cuda, *nccl, controls, room, index);
    if (index == 0) std::printf("%d tests passed\n", std::max(0, passed));
    std::fflush(stdout);
    return passed > 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("FAILED  rank %d: %s\n", index, error.what());
    std::fflush(stdout);
    room.fail();
    return 1;
  }
}

/// Kills the remaining ranks after kGraceS, because a rank may wait inside NCCL for a rank that has ended.
void end_soon(const std::vector<pid_t>& children) {
  ::sleep(kGraceS);
  for (const pid_t child : children) {
    if (child != 0) ::kill(child, SIGKILL);
  }
}

int run_processes(const Options& options, Room& room) {
  std::vector<pid_t> children;
  for (int i = 0; i < options.ranks; ++i) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(run_process(options, room, i));
    children.push_back(child);
  }
  int failed = 0;
  for (std::size_t left = children.size(); left > 0; --left) {
    int status = 0;
    const pid_t child = ::waitpid(-1, &status, 0);
    const auto place = std::ranges::find(children, child);
    if (place == children.end()) return 1;
    *place = 0;
    if (status == 0) continue;
    if (!WIFSIGNALED(status) || std::exchange(failed, 1) != 0) {
      failed = 1;
      continue;
    }
    std::printf("FAILED  rank %td of %d: its process ended by signal %d\n",
                place - children.begin(), options.ranks, WTERMSIG(status));
    std::fflush(stdout);
    room.fail();
    end_soon(children);
  }
  return failed;
}

}  // namespace

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  ::alarm(kDeadlineS);
  Library loaded;
  if (!options.loaded.empty()) loaded = Library::open(options.loaded);
  if (!options.has_device) return check_without_device(options.nccl);
  Room room(options.ranks);
  return options.has_processes ? run_processes(options, room) : run_threads(options, room);
}

}  // namespace sparkhvd::conformity

int main(int argc, char** argv) {
  try {
    return sparkhvd::conformity::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nccl_conformity: %s\n", error.what());
    return 2;
  }
}
