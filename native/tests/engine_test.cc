// The engine through its C boundary: ranks as threads, in shared memory, over sockets, and mixed.
#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

#include "world.h"

namespace sparkhvd::test {
namespace {

using Floats = std::vector<float>;

struct Layout {
  const char* name;
  std::vector<std::int32_t> hosts;
  bool use_shared_memory = true;
};

/// One host with and without shared memory, several hosts of one rank, and hosts of unequal size.
std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (int size = 1; size <= 5; ++size) {
    all.push_back({"shared memory", one_host(size)});
    all.push_back({"sockets", one_host(size), false});
  }
  all.push_back({"two hosts of two", {0, 0, 1, 1}});
  all.push_back({"hosts of three and one", {0, 0, 0, 1}});
  all.push_back({"hosts of one and two, mixed order", {0, 1, 0, 1, 1}});
  all.push_back({"three hosts of one", {0, 1, 2}});
  return all;
}

WorldOptions world(const Layout& layout) {
  WorldOptions options;
  options.hosts = layout.hosts;
  options.use_shared_memory = layout.use_shared_memory;
  return options;
}

/// Small integers, so that every order of addition is exact.
float value(std::int32_t rank, std::size_t index) {
  return static_cast<float>((index * 7 + static_cast<std::size_t>(rank) * 13) % 31);
}

Floats input_of(std::int32_t rank, std::size_t count) {
  Floats data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(rank, i);
  return data;
}

std::string text_of(const Layout& layout, std::size_t count) {
  return std::string(layout.name) + ", " + std::to_string(layout.hosts.size()) + " ranks, " +
         std::to_string(count) + " elements";
}

Status allreduce(TestEngine& engine, const std::string& name, const Floats& input, Floats& output,
                 std::int32_t op = SPARKHVD_SUM) {
  Request request(SPARKHVD_ALLREDUCE, name);
  request.tensor(input.data(), output.data(), {static_cast<std::int64_t>(input.size())});
  request.raw().reduce_op = op;
  return engine.submit(request.raw()).wait();
}

}  // namespace

TEST(allreduce_sums_every_size_on_every_layout) {
  for (const auto& layout : layouts()) {
    const auto size = layout.hosts.size();
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
      // 4096-byte slots: 1024 elements each; the symmetric path ends at one slot.
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, size - 1, size, size + 1, std::size_t{997},
            std::size_t{1024}, std::size_t{1025}, std::size_t{7919}, std::size_t{200003}}) {
        const Floats input = input_of(rank, count);
        Floats output(count, -1);
        const Status status = allreduce(engine, "size " + std::to_string(count), input, output);
        CHECK_MESSAGE(status.code == SPARKHVD_OK, text_of(layout, count) + ": " + status.message);
        for (std::size_t i = 0; i < count; ++i) {
          float expected = 0;
          for (std::size_t r = 0; r < size; ++r) expected += value(static_cast<std::int32_t>(r), i);
          CHECK_MESSAGE(output[i] == expected,
                        text_of(layout, count) + ", at " + std::to_string(i));
        }
      }
    });
  }
}

}  // namespace sparkhvd::test
