// Times allreduce of two processes on this host, through the C boundary, and what the machine can do
// with nothing around it (bare_allreduce.h). All by turns, in the same two processes.
//   allreduce_bench                a table: median (fastest) per size, microseconds of the slower process
//   allreduce_bench --serve        a line "LEG BYTES CALLS" in, a line with the microseconds of each call out,
//                                  until the input ends; first it says which legs there are
//   options: --sockets (the engine without shared memory)  --pin (each process to a CPU of its own)
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bare_allreduce.h"
#include "sparkhvd.h"

namespace {

constexpr std::size_t kMaxBytes = 256 << 20;
constexpr int kMaxCalls = 10000;
constexpr int kWarmUps = 2;

struct Options {
  bool serve = false;
  bool use_shared_memory = true;
  bool pin = false;
};

enum class Leg : int { kEngine, kRegistered, kBareDirect, kBareChunked, kEnd };
const std::map<std::string, Leg>& legs() {
  static const std::map<std::string, Leg> names{{"engine", Leg::kEngine},
                                                {"registered", Leg::kRegistered},
                                                {"direct", Leg::kBareDirect},
                                                {"chunked", Leg::kBareChunked}};
  return names;
}

struct Order {
  Leg leg = Leg::kEnd;
  std::size_t bytes = 0;
  int calls = 0;
};

/// Where process 1 leaves its times for process 0.
struct Times {
  std::array<double, kMaxCalls> us;
};

void check(std::int32_t status, const char* error) {
  if (status != SPARKHVD_OK) throw std::runtime_error(error);
}

/// One of the two processes: executes orders, and keeps its tensors between them.
class Process {
 public:
  Process(int rank, int socket, int data_socket, const Options& options, bare::Shared& shared)
      : bare_(shared, rank) {
    const std::int32_t hosts[] = {0, 0};
    std::int32_t sockets[] = {-1, -1};
    std::int32_t data_sockets[] = {-1, -1};
    sockets[1 - rank] = socket;
    data_sockets[1 - rank] = data_socket;
    sparkhvd_engine_options engine{};
    engine.struct_size = sizeof(engine);
    engine.rank = rank;
    engine.size = 2;
    engine.hosts = hosts;
    engine.sockets = sockets;
    engine.streams = 1;
    engine.stream_sockets = data_sockets;
    engine.spin_us = 30;
    engine.stall_shutdown_s = 60;
    engine.host_loss_s = 15;
    engine.connect_timeout_s = 20;
    engine.slot_bytes = 256 << 10;
    engine.slots = 4;
    engine.use_shared_memory = options.use_shared_memory ? 1 : 0;
    check(sparkhvd_engine_create(&engine, &engine_, error_, sizeof(error_)), error_);
  }
  ~Process() {
    sparkhvd_engine_destroy(engine_);
    if (registered_ != nullptr) sparkhvd_buffer_release(registered_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Microseconds of each call.
  std::vector<double> obey(const Order& order) {
    // Zeros, because they stay finite in sum after sum. The shared buffers were never anything else.
    const std::size_t count = order.bytes / sizeof(float);
    if (order.leg == Leg::kRegistered && registered_ == nullptr) make_registered();
    if (data_.size() != count) data_.assign(count, 0.0F);
    std::vector<double> times;
    for (int i = 0; i < order.calls + kWarmUps; ++i) {
      bare_.meet();
      const auto begin = std::chrono::steady_clock::now();
      call(order.leg, count);
      const auto end = std::chrono::steady_clock::now();
      if (i < kWarmUps) continue;
      times.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    }
    return times;
  }

 private:
  void call(Leg leg, std::size_t count) {
    switch (leg) {
      case Leg::kEngine:
        return allreduce(data_);
      case Leg::kRegistered:
        return allreduce({static_cast<float*>(sparkhvd_buffer_data(registered_)), count});
      case Leg::kBareDirect:
        return bare_.direct(count);
      case Leg::kBareChunked:
        return bare_.chunked(data_);
      case Leg::kEnd:
        break;
    }
  }

  static sparkhvd_request request_of(std::int32_t collective) {
    sparkhvd_request request{};
    request.struct_size = sizeof(request);
    request.collective = collective;
    request.name = "gradients";
    request.dtype = SPARKHVD_FLOAT32;
    request.reduce_op = SPARKHVD_SUM;
    request.prescale = request.postscale = 1;
    request.device = SPARKHVD_DEVICE_CPU;
    request.timeout_s = -1;
    return request;
  }

  void allreduce(std::span<float> data) {
    const std::int64_t shape[] = {static_cast<std::int64_t>(data.size())};
    const sparkhvd_tensor tensor{data.data(), data.data(), shape, 1, 0, 0};
    sparkhvd_request request = request_of(SPARKHVD_ALLREDUCE);
    request.num_tensors = 1;
    request.tensors = &tensor;
    sparkhvd_work* work = nullptr;
    check(sparkhvd_run(engine_, &request, 60000, &work, error_, sizeof(error_)), error_);
  }

  /// Memory for the largest tensor; once, because registering is not what is measured.
  void make_registered() {
    const std::int64_t bytes[] = {static_cast<std::int64_t>(kMaxBytes)};
    sparkhvd_request request = request_of(SPARKHVD_REGISTER);
    request.splits = bytes;
    request.num_splits = 1;
    sparkhvd_work* work = nullptr;
    check(sparkhvd_submit(engine_, &request, &work, error_, sizeof(error_)), error_);
    check(sparkhvd_wait(work, 60000, error_, sizeof(error_)), error_);
    check(sparkhvd_work_buffer(work, &registered_, error_, sizeof(error_)), error_);
    sparkhvd_work_release(work);
  }

  bare::Rank bare_;
  sparkhvd_engine* engine_ = nullptr;
  sparkhvd_buffer* registered_ = nullptr;
  char error_[1024] = "";
  std::vector<float> data_;
};

/// Process 0: passes orders on and takes the slower time of each call.
class Both {
 public:
  Both(Process& own, int pipe, const Times& theirs) : own_(&own), pipe_(pipe), theirs_(&theirs) {}
  ~Both() { tell(Order{}); }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;

  std::vector<double> obey(const Order& order) {
    tell(order);
    auto times = own_->obey(order);
    char done = 0;
    if (::read(pipe_, &done, 1) != 1) throw std::runtime_error("the other process is gone");
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], theirs_->us[i]);
    return times;
  }

 private:
  void tell(const Order& order) {
    [[maybe_unused]] const auto written = ::write(pipe_, &order, sizeof(order));
  }

  Process* own_;
  int pipe_;
  const Times* theirs_;
};

void follow(Process& process, int pipe, Times& times) {
  Order order;
  while (::read(pipe, &order, sizeof(order)) == sizeof(order) && order.leg != Leg::kEnd) {
    const auto own = process.obey(order);
    std::ranges::copy(own, times.us.begin());
    const char done = 1;
    if (::write(pipe, &done, 1) != 1) return;
  }
}

void serve(Both& both) {
  for (const auto& [name, leg] : legs()) std::cout << name << ' ';
  std::cout << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string name;
    Order order;
    words >> name >> order.bytes >> order.calls;
    const auto leg = legs().find(name);
    if (!words || leg == legs().end() || order.bytes < sizeof(float) || order.bytes > kMaxBytes ||
        order.calls < 1 || order.calls > kMaxCalls) {
      throw std::runtime_error("not an order: " + line);
    }
    order.leg = leg->second;
    for (const double us : both.obey(order)) std::cout << us << ' ';
    std::cout << std::endl;
  }
}

void print_table(Both& both) {
  constexpr int kRounds = 7;
  const std::array<std::size_t, 8> sizes{4,       4 << 10,  64 << 10, 1 << 20,
                                         4 << 20, 16 << 20, 64 << 20, 256 << 20};
  std::printf("%12s", "bytes");
  for (const auto& [name, leg] : legs()) std::printf(" %12s (fastest)", name.c_str());
  std::printf("\n");
  for (const std::size_t bytes : sizes) {
    std::map<Leg, std::vector<double>> times;
    const int calls = static_cast<int>(std::clamp<std::size_t>((64 << 20) / bytes, 2, 500));
    for (int round = 0; round < kRounds; ++round) {
      for (const auto& [name, leg] : legs()) {
        const auto some = both.obey({leg, bytes, calls});
        times[leg].insert(times[leg].end(), some.begin(), some.end());
      }
    }
    std::printf("%12zu", bytes);
    for (const auto& [name, leg] : legs()) {
      auto& all = times[leg];
      std::ranges::sort(all);
      std::printf(" %12.1f %9.1f", all[all.size() / 2], all[0]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--serve") {
      options.serve = true;
    } else if (word == "--sockets") {
      options.use_shared_memory = false;
    } else if (word == "--pin") {
      options.pin = true;
    } else {
      throw std::runtime_error("unknown option " + word + "; see the top of allreduce_bench.cc");
    }
  }
  return options;
}

int run(const Options& options) {
  bare::Shared shared(2, kMaxBytes);
  void* memory =
      ::mmap(nullptr, sizeof(Times), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
  auto& times = *static_cast<Times*>(memory);
  int engines[2];
  int tensors[2];
  int orders[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, engines) != 0 ||
      ::socketpair(AF_UNIX, SOCK_STREAM, 0, tensors) != 0 ||
      ::socketpair(AF_UNIX, SOCK_STREAM, 0, orders) != 0) {
    throw std::runtime_error("socketpair failed");
  }
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  const std::size_t rank = child == 0 ? 1 : 0;
  ::close(engines[1 - rank]);
  ::close(tensors[1 - rank]);
  ::close(orders[1 - rank]);
  if (options.pin) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(rank, &cpus);
    ::sched_setaffinity(0, sizeof(cpus), &cpus);
  }
  Process process(static_cast<int>(rank), engines[rank], tensors[rank], options, shared);
  if (rank == 1) {
    follow(process, orders[1], times);
    return 0;
  }
  {
    Both both(process, orders[0], times);
    if (options.serve) {
      serve(both);
    } else {
      print_table(both);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status != 0 ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(options_of(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "allreduce_bench: %s\n", error.what());
    return 1;
  }
}
