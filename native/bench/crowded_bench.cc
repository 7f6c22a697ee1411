// What an allreduce of N processes costs on this host with nothing around it (bare_allreduce.h), also with more
// processes than cores.
//   crowded_bench RANKS     lines "BYTES CALLS" in, per line one with the microseconds of each call of the slowest
//                           process out, until the input ends
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bare_allreduce.h"

namespace {

constexpr int kMaxCalls = 10000;
constexpr int kWarmUps = 2;

struct Order {
  std::size_t bytes = 0;  // 0: the end
  int calls = 0;
};

/// What process 0 tells the others, and where all leave their times.
struct Board {
  Order order;
  std::array<std::array<double, kMaxCalls>, bare::Shared::kMaxRanks> us;
};

void obey(bare::Rank& rank, int index, Board& board) {
  std::vector<float> data(board.order.bytes / sizeof(float));
  for (int i = 0; i < board.order.calls + kWarmUps; ++i) {
    rank.meet();
    const auto begin = std::chrono::steady_clock::now();
    rank.chunked(data);
    const auto end = std::chrono::steady_clock::now();
    if (i < kWarmUps) continue;
    board.us[static_cast<std::size_t>(index)][static_cast<std::size_t>(i - kWarmUps)] =
        std::chrono::duration<double, std::micro>(end - begin).count();
  }
  rank.meet();
}

void lead(bare::Rank& rank, int ranks, Board& board) {
  std::string line;
  while (std::getline(std::cin, line)) {
    Order order;
    if (std::sscanf(line.c_str(), "%zu %d", &order.bytes, &order.calls) != 2 ||
        order.bytes < sizeof(float) || order.calls < 1 || order.calls > kMaxCalls) {
      throw std::runtime_error("not an order: " + line);
    }
    board.order = order;
    rank.meet();
    obey(rank, 0, board);
    for (std::size_t call = 0; call < static_cast<std::size_t>(order.calls); ++call) {
      double slowest = 0;
      for (int other = 0; other < ranks; ++other) {
        slowest = std::max(slowest, board.us[static_cast<std::size_t>(other)][call]);
      }
      std::cout << slowest << ' ';
    }
    std::cout << std::endl;
  }
  board.order = {};
  rank.meet();
}

int run(int ranks) {
  bare::Shared shared(ranks, 0);
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
  auto& board = *new (memory) Board;
  for (int index = 1; index < ranks; ++index) {
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child > 0) continue;
    // Waits have no deadline: without process 0 they would last for ever.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    bare::Rank rank(shared, index);
    while (true) {
      rank.meet();
      if (board.order.bytes == 0) ::_exit(0);
      obey(rank, index, board);
    }
  }
  bare::Rank rank(shared, 0);
  lead(rank, ranks, board);
  while (::wait(nullptr) > 0) {
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int ranks = argc == 2 ? std::atoi(argv[1]) : 0;
    if (ranks < 2 || ranks > bare::Shared::kMaxRanks) {
      throw std::runtime_error("give a number of processes from 2 to " +
                               std::to_string(bare::Shared::kMaxRanks));
    }
    return run(ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crowded_bench: %s\n", error.what());
    return 1;
  }
}
