// Times allreduce between two processes on this host: median and minimum per size, through the C
// boundary.
//   allreduce_bench [shared_memory 0|1] [pin each rank to a CPU of its own 0|1]
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "sparkhvd.h"

namespace {

struct Case {
  std::size_t bytes;
  int rounds;
};

int run(std::int32_t rank, int socket, std::uint32_t use_shared_memory) {
  const std::int32_t hosts[] = {0, 0};
  std::int32_t sockets[] = {-1, -1};
  sockets[1 - rank] = socket;
  sparkhvd_engine_options options{};
  options.struct_size = sizeof(options);
  options.rank = rank;
  options.size = 2;
  options.hosts = hosts;
  options.sockets = sockets;
  options.spin_us = 30;
  options.stall_shutdown_s = 60;
  options.host_loss_s = 15;
  options.connect_timeout_s = 20;
  options.slot_bytes = 256 << 10;
  options.slots = 4;
  options.use_shared_memory = use_shared_memory;
  sparkhvd_engine* engine = nullptr;
  char error[1024] = "";
  if (sparkhvd_engine_create(&options, &engine, error, sizeof(error)) != SPARKHVD_OK) {
    std::fprintf(stderr, "create: %s\n", error);
    return 1;
  }
  const Case cases[] = {{4, 5000},      {64 << 10, 2000}, {1 << 20, 400}, {4 << 20, 200},
                        {16 << 20, 60}, {64 << 20, 20},   {256 << 20, 6}};
  if (rank == 0) std::printf("%12s %12s %12s %12s\n", "bytes", "median us", "min us", "p99 us");
  for (const auto& [bytes, rounds] : cases) {
    std::vector<float> data(bytes / 4, 1.0F);
    std::vector<float> out(bytes / 4);
    const std::int64_t shape[] = {static_cast<std::int64_t>(data.size())};
    const sparkhvd_tensor tensor{data.data(), out.data(), shape, 1, 0};
    sparkhvd_request request{};
    request.struct_size = sizeof(request);
    request.collective = SPARKHVD_ALLREDUCE;
    request.name = "gradients";
    request.dtype = SPARKHVD_FLOAT32;
    request.reduce_op = SPARKHVD_SUM;
    request.prescale = request.postscale = 1;
    request.device = SPARKHVD_DEVICE_CPU;
    request.num_tensors = 1;
    request.tensors = &tensor;
    request.timeout_s = -1;
    std::vector<double> times;
    for (int i = 0; i < rounds + 3; ++i) {
      const auto start = std::chrono::steady_clock::now();
      sparkhvd_work* work = nullptr;
      std::int32_t status = sparkhvd_submit(engine, &request, &work, error, sizeof(error));
      if (status == SPARKHVD_OK) status = sparkhvd_wait(work, 60000, error, sizeof(error));
      sparkhvd_work_release(work);
      if (status != SPARKHVD_OK) {
        std::fprintf(stderr, "allreduce: %s\n", error);
        return 1;
      }
      const auto end = std::chrono::steady_clock::now();
      if (i >= 3) times.push_back(std::chrono::duration<double, std::micro>(end - start).count());
    }
    std::sort(times.begin(), times.end());
    if (rank == 0) {
      std::printf("%12zu %12.1f %12.1f %12.1f\n", bytes, times[times.size() / 2], times[0],
                  times[times.size() * 99 / 100]);
      std::fflush(stdout);
    }
  }
  sparkhvd_engine_destroy(engine);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool use_shared_memory = argc < 2 || std::string(argv[1]) != "0";
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 1;
  const pid_t child = ::fork();
  if (child < 0) return 1;
  ::close(pair[child == 0 ? 0 : 1]);
  if (argc > 2 && std::string(argv[2]) == "1") {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(child == 0 ? 1 : 0, &cpus);
    ::sched_setaffinity(0, sizeof(cpus), &cpus);
  }
  const int result = run(child == 0 ? 1 : 0, pair[child == 0 ? 1 : 0], use_shared_memory ? 1 : 0);
  if (child == 0) return result;
  int status = 0;
  ::waitpid(child, &status, 0);
  return result != 0 || status != 0 ? 1 : 0;
}
