// Times collectives between islands of one rank: ranks as threads of this process, connected over TCP.
//   islands_bench ISLANDS [allreduce|broadcast|alltoall] [BYTES ...]
// A line per size: median (fastest) milliseconds of the slowest rank.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "world.h"

namespace {

using namespace sparkhvd::test;
using Clock = std::chrono::steady_clock;

constexpr int kWarmUps = 2;

std::int32_t collective_of(const std::string& name) {
  if (name == "broadcast") return SPARKHVD_BROADCAST;
  if (name == "alltoall") return SPARKHVD_ALLTOALL;
  return SPARKHVD_ALLREDUCE;
}

void run_once(TestEngine& engine, std::int32_t collective, std::vector<float>& data, int ranks) {
  Request request(collective, "x");
  const auto count = static_cast<std::int64_t>(data.size());
  const bool is_alltoall = collective == SPARKHVD_ALLTOALL;
  request.tensor(data.data(), is_alltoall ? nullptr : data.data(), {count});
  if (is_alltoall) {
    std::vector<std::int64_t> splits(static_cast<std::size_t>(ranks), count / ranks);
    splits[0] += count % ranks;
    request.numbers(splits);
  }
  const Status status = engine.submit(request.raw()).wait(600000);
  if (status.code != SPARKHVD_OK) throw Failure(status.message);
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 16;
  const std::int32_t collective = collective_of(argc > 2 ? argv[2] : "allreduce");
  std::vector<std::size_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(static_cast<std::size_t>(std::atoll(argv[i])));
  if (sizes.empty()) sizes = {4, 64 << 10, 1 << 20, 16 << 20};
  WorldOptions options;
  options.hosts.resize(static_cast<std::size_t>(ranks));
  std::iota(options.hosts.begin(), options.hosts.end(), 0);
  options.use_tcp = true;
  options.spin_us = 0;  // more ranks than CPUs
  std::barrier meet(ranks);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    for (const std::size_t bytes : sizes) {
      std::vector<float> data(bytes / sizeof(float));
      const std::size_t budget = std::size_t{256} << 20;
      const int rounds = static_cast<int>(
          std::clamp<std::size_t>(budget / (bytes * options.hosts.size()), 5, 200));
      std::vector<double> times;
      for (int i = 0; i < rounds + kWarmUps; ++i) {
        meet.arrive_and_wait();
        const auto begin = Clock::now();
        run_once(engine, collective, data, ranks);
        meet.arrive_and_wait();
        const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
        if (i >= kWarmUps) times.push_back(time.count());
      }
      if (rank != 0) continue;
      std::ranges::sort(times);
      std::printf("%10zu bytes  %9.3f (%.3f) ms\n", bytes, times[times.size() / 2], times[0]);
      std::fflush(stdout);
    }
  });
}
