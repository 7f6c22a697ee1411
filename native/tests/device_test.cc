// Operations on devices through the C interface, with ranks as threads. The device is the stand-in of tests/fake_cuda.
// Its streams are real queues, so a missing dependency gives wrong data.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "device_world.h"
#include "types.h"

namespace sparkhvd::test::device_test {
namespace {

using Bytes = std::vector<std::byte>;

bool contains(const Ranks& ranks, std::int32_t rank) { return std::ranges::count(ranks, rank) > 0; }

std::size_t size_of(std::int32_t dtype) { return element_size(to_dtype(dtype).value()); }

/// Small numbers of a type, so that sums are exact in any order.
Bytes numbers(std::int32_t dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<int>(random() % (dtype == SPARKHVD_BOOL ? 2 : 4));
    std::byte* at = bytes.data() + i * size_of(dtype);
    const auto put = [&](auto number) { std::memcpy(at, &number, sizeof(number)); };
    switch (dtype) {
      case SPARKHVD_FLOAT32:
        put(static_cast<float>(value));
        break;
      case SPARKHVD_FLOAT64:
        put(static_cast<double>(value));
        break;
      case SPARKHVD_FLOAT16:
        put(std::array<std::uint16_t, 4>{0, 0x3c00, 0x4000, 0x4200}.at(
            static_cast<std::size_t>(value)));
        break;
      case SPARKHVD_BFLOAT16:
        put(std::array<std::uint16_t, 4>{0, 0x3f80, 0x4000, 0x4040}.at(
            static_cast<std::size_t>(value)));
        break;
      default:
        std::memset(at, 0, size_of(dtype));
        *at = static_cast<std::byte>(value);
    }
  }
  return bytes;
}

const std::vector<std::int32_t> kDTypes{
    SPARKHVD_UINT8, SPARKHVD_INT8,    SPARKHVD_UINT16, SPARKHVD_INT16,   SPARKHVD_UINT32,
    SPARKHVD_INT32, SPARKHVD_INT64,   SPARKHVD_UINT64, SPARKHVD_FLOAT16, SPARKHVD_BFLOAT16,
    SPARKHVD_BOOL,  SPARKHVD_FLOAT32, SPARKHVD_FLOAT64};

/// Runs an operation on the device and on the CPU, and checks that the bytes are equal. Other tests check the CPU's
/// results.
class Comparison {
 public:
  Comparison(TestEngine& engine, Gpu& gpu, std::int32_t rank, std::int32_t size)
      : engine_(engine), gpu_(gpu), rank_(rank), size_(size) {}

  void run(std::int32_t collective, std::int32_t dtype, std::int32_t op,
           const std::vector<std::int64_t>& rows, std::int64_t row_size) {
    const bool is_uneven = collective == SPARKHVD_ALLGATHER || collective == SPARKHVD_ALLTOALL;
    const std::string name = std::to_string(count_++);
    Request on_cpu(collective, "cpu " + name, dtype);
    Request on_gpu(collective, "gpu " + name, dtype);
    std::vector<Bytes> inputs;
    std::vector<Bytes> outputs;
    std::vector<std::byte*> results;
    std::vector<std::size_t> sizes;
    inputs.reserve(rows.size());
    outputs.reserve(rows.size());
    std::vector<std::int64_t> splits;
    for (std::size_t t = 0; t < rows.size(); ++t) {
      std::int64_t own = rows[t] + (is_uneven ? rank_ * (rows[t] % 3) : 0);
      if (collective == SPARKHVD_ALLTOALL) {
        own = 0;
        for (std::int32_t to = 0; to < size_; ++to) {
          splits.push_back((rows[t] + rank_ + 2 * to) % 4);
          own += splits.back();
        }
      }
      const auto seed =
          static_cast<std::uint32_t>(1000 * count_ + 10 * rank_) + static_cast<std::uint32_t>(t);
      inputs.push_back(numbers(dtype, static_cast<std::size_t>(own * row_size), seed));
      std::int64_t result_rows = own;
      if (collective == SPARKHVD_REDUCESCATTER) {
        result_rows = own / size_ + (rank_ < own % size_ ? 1 : 0);
      } else if (collective == SPARKHVD_ALLGATHER) {
        result_rows = size_ * rows[t] + (size_ * (size_ - 1) / 2) * (rows[t] % 3);
      } else if (collective == SPARKHVD_ALLTOALL) {
        result_rows = 0;
        for (std::int32_t from = 0; from < size_; ++from) {
          result_rows += (rows[t] + from + 2 * rank_) % 4;
        }
      }
      sizes.push_back(static_cast<std::size_t>(result_rows * row_size) * size_of(dtype));
      outputs.emplace_back(sizes.back());
      const std::vector<std::int64_t> shape{own, row_size};
      std::byte* input = gpu_.allocate(inputs[t].size());
      gpu_.write(input, inputs[t].data(), inputs[t].size());
      const bool is_in_place = collective == SPARKHVD_ALLGATHER_INTO;
      results.push_back(is_in_place ? input : gpu_.allocate(sizes.back()));
      if (is_in_place) outputs[t] = inputs[t];
      std::byte* expected = is_uneven ? nullptr : outputs[t].data();
      on_cpu.tensor(is_in_place ? expected : inputs[t].data(), expected, shape);
      on_gpu.tensor(input, results[t], shape);
    }
    for (Request* request : {&on_cpu, &on_gpu}) {
      request->raw().reduce_op = op;
      request->raw().root_rank = size_ - 1;
      if (!splits.empty()) request->numbers(splits);
    }
    TestWork cpu_work = engine_.submit(on_cpu.raw());
    TestWork gpu_work = engine_.submit(gpu_.use(on_gpu));
    const std::string what = "collective " + std::to_string(collective) + ", dtype " +
                             std::to_string(dtype) + ", op " + std::to_string(op) + ", rows " +
                             std::to_string(rows[0]);
    CHECK_MESSAGE(cpu_work.wait().code == SPARKHVD_OK, what + cpu_work.wait().message);
    CHECK_MESSAGE(gpu_.wait_stream(gpu_work).code == SPARKHVD_OK, what);
    Bytes expected;
    Bytes got;
    if (is_uneven) expected = result_of<std::byte>(cpu_work).data;
    for (std::size_t t = 0; t < rows.size(); ++t) {
      if (!is_uneven) expected.insert(expected.end(), outputs[t].begin(), outputs[t].end());
      Bytes part(sizes[t]);
      gpu_.read(part.data(), results[t], part.size());
      gpu_.synchronize();
      got.insert(got.end(), part.begin(), part.end());
    }
    CHECK_MESSAGE(got == expected, what);
    CHECK_MESSAGE(gpu_work.wait().code == SPARKHVD_OK, what);
    if (is_uneven) CHECK(result_of(gpu_work).rows == result_of(cpu_work).rows);
  }

 private:
  TestEngine& engine_;
  Gpu& gpu_;
  std::int32_t rank_;
  std::int32_t size_;
  int count_ = 0;
};

}  // namespace

TEST(device_collectives_give_what_the_cpu_gives) {
  FakeScope fake;
  for (const int size : {1, 2, 3}) {
    run_ranks(world(one_host(size)), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      Comparison compare(engine, gpu, rank, size);
      const std::vector<std::int64_t> some{0, 1, 6, 7};
      for (const auto dtype : kDTypes) {
        const bool is_short = dtype == SPARKHVD_INT16 || dtype == SPARKHVD_UINT16;
        for (const auto op : {SPARKHVD_SUM, SPARKHVD_MIN, SPARKHVD_MAX, SPARKHVD_PRODUCT}) {
          if (is_short) continue;
          compare.run(SPARKHVD_ALLREDUCE, dtype, op, some, 3);
          compare.run(SPARKHVD_REDUCESCATTER, dtype, op, some, 3);
        }
        for (const auto collective : {SPARKHVD_ALLGATHER, SPARKHVD_ALLGATHER_INTO}) {
          compare.run(collective, dtype, 0, some, 3);
          compare.run(collective, dtype, 0, {0}, 3);
        }
        for (const std::int64_t rows : {0, 1, 1001}) {
          compare.run(SPARKHVD_BROADCAST, dtype, 0, {rows}, 1);
          compare.run(SPARKHVD_ALLTOALL, dtype, 0, {rows}, 5);
        }
      }
      compare.run(SPARKHVD_ALLREDUCE, SPARKHVD_FLOAT32, SPARKHVD_SUM, {0}, 1);
      compare.run(SPARKHVD_ALLREDUCE, SPARKHVD_FLOAT32, SPARKHVD_SUM, {100003}, 1);
    });
    fake.check();
  }
}

TEST(device_and_cpu_operations_go_on_side_by_side) {
  FakeScope fake;
  for (const auto& hosts : {one_host(3), std::vector<std::int32_t>{0, 1, 1}}) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      std::vector<std::unique_ptr<Sum>> sums;
      std::vector<Floats> data(60, Floats(1000, static_cast<float>(rank + 1)));
      std::vector<int> order(60);
      std::iota(order.begin(), order.end(), 0);
      std::mt19937 random(static_cast<unsigned>(rank));
      std::ranges::shuffle(order, random);
      std::vector<TestWork> works;
      for (const int i : order) {
        if (i % 2 == 0) {
          sums.push_back(std::make_unique<Sum>(gpu, data[static_cast<std::size_t>(i)]));
          works.push_back(sums.back()->start(engine, std::to_string(i)));
        } else {
          Request request(SPARKHVD_ALLREDUCE, std::to_string(i));
          auto& values = data[static_cast<std::size_t>(i)];
          works.push_back(
              engine.submit(request.tensor(values.data(), values.data(), {1000}).raw()));
        }
      }
      for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
      for (auto& sum : sums) CHECK(sum->result() == Floats(1000, 6));
      for (std::size_t i = 1; i < 60; i += 2) CHECK(data[i] == Floats(1000, 6));
    });
    fake.check();
  }
}

TEST(overlapping_process_sets_on_devices_work_in_different_orders) {
  FakeScope fake;
  for (const auto& hosts : {one_host(4), std::vector<std::int32_t>{0, 1, 0, 1}}) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      // The second set does not have rank 0; the last set has neither rank 0 nor rank 1.
      const std::vector<Ranks> sets{{0, 1, 2}, {1, 2, 3}, {0, 1, 2, 3}, {2, 3}};
      std::vector<std::int32_t> ids{};
      for (const auto& ranks : sets) ids.push_back(add_process_set(engine, ranks));
      for (int round = 0; round < 10; ++round) {
        std::vector<std::unique_ptr<Sum>> sums;
        std::vector<TestWork> works;
        std::vector<std::size_t> mine;
        for (std::size_t i = 0; i < sets.size(); ++i) {
          const std::size_t which = (i + static_cast<std::size_t>(rank + round)) % sets.size();
          if (!contains(sets[which], rank)) continue;
          sums.push_back(std::make_unique<Sum>(gpu, Floats(211, static_cast<float>(rank))));
          works.push_back(sums.back()->start(engine, "same name", ids[which]));
          mine.push_back(which);
        }
        for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
        for (std::size_t i = 0; i < mine.size(); ++i) {
          float expected = 0;
          for (const auto r : sets[mine[i]]) expected += static_cast<float>(r);
          CHECK(sums[i]->result() == Floats(211, expected));
        }
      }
      // Rank 0 passes on the orders of all sets, although it is not in all of them, so it must not leave early.
      Request barrier(SPARKHVD_BARRIER, "end");
      CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
    });
    fake.check();
  }
}

TEST(overlapping_process_sets_on_devices_survive_any_order_and_delay) {
  FakeScope fake;
  Fake::get().delay_streams(50);
  run_ranks(world(one_host(4)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    const std::vector<Ranks> sets{{0, 1, 2}, {1, 2, 3}};
    std::vector<std::int32_t> ids{};
    for (const auto& ranks : sets) ids.push_back(add_process_set(engine, ranks));
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int round = 0; round < 60; ++round) {
      std::vector<std::size_t> order;
      // Ranks 1 and 2 are in both sets, and submit in opposite orders.
      for (std::size_t i = 0; i < 4; ++i) order.push_back(rank == 1 ? i % 2 : (i + 1) % 2);
      std::vector<std::unique_ptr<Sum>> sums;
      std::vector<TestWork> works;
      std::vector<std::size_t> mine;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const std::size_t which = order[i];
        if (!contains(sets[which], rank)) continue;
        if (random() % 4 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        sums.push_back(std::make_unique<Sum>(gpu, Floats(17, static_cast<float>(rank))));
        works.push_back(sums.back()->start(engine, std::to_string(i / 2), ids[which]));
        mine.push_back(which);
      }
      if (random() % 3 == 0) CHECK_EQUAL(gpu.wait_stream(works.back()).message, "");
      for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
      for (std::size_t i = 0; i < mine.size(); ++i) {
        CHECK(sums[i]->result() == Floats(17, mine[i] == 0 ? 3 : 6));
      }
    }
    // Rank 0 must not leave early, because it passes on the orders of all sets.
    Request barrier(SPARKHVD_BARRIER, "end");
    CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
  });
  fake.check();
}

TEST(orders_on_devices_wait_at_rank_0_for_a_set_that_it_has_yet_to_make) {
  FakeScope fake;
  // Rank 3 sends so many bytes to rank 0 that the other ranks have created the set long before rank 0.
  constexpr std::int64_t kRows = 16 << 20;
  run_ranks(world({0, 1, 2, 3}), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    for (int round = 0; round < 2; ++round) {
      Floats much(rank == 3 ? kRows : 0, 1);
      Request exchange(SPARKHVD_ALLTOALL, "much");
      exchange.tensor(much.data(), nullptr, {rank == 3 ? kRows : 0});
      exchange.numbers({rank == 3 ? kRows : 0, 0, 0, 0});
      TestWork busy = engine.submit(exchange.raw());
      Request add(SPARKHVD_ADD_PROCESS_SET, "add");
      TestWork added = engine.submit(add.numbers({1, 2}).raw());
      if (rank == 1 || rank == 2) {
        CHECK_EQUAL(added.wait().message, "");
        Sum sum(gpu, Floats(10, static_cast<float>(rank)));
        const auto id = static_cast<std::int32_t>(result_of(added).rows.at(0));
        CHECK_EQUAL(sum.start(engine, "early", id).wait().message, "");
        CHECK(sum.result() == Floats(10, 3));
      }
      CHECK_EQUAL(busy.wait().message, "");
      CHECK_EQUAL(added.wait().message, "");
    }
  });
  fake.check();
}

TEST(a_removed_process_set_runs_what_was_agreed_on_its_devices) {
  FakeScope fake;
  for (int round = 0; round < 5; ++round) {
    Fake::get().delay_streams(round * 500);
    run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      for (const Ranks& ranks : {Ranks{1, 2}, Ranks{0, 2}}) {
        const auto id = add_process_set(engine, ranks);
        std::vector<std::unique_ptr<Sum>> sums;
        std::vector<TestWork> works;
        for (int i = 0; contains(ranks, rank) && i < 5; ++i) {
          sums.push_back(std::make_unique<Sum>(gpu, Floats(10, 1)));
          works.push_back(sums.back()->start(engine, std::to_string(i), id));
        }
        Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
        CHECK_EQUAL(engine.submit(remove.numbers({id}).raw()).wait().message, "");
        for (std::size_t i = 0; i < works.size(); ++i) {
          // All operations run, because every rank submits them before it removes the set.
          CHECK_EQUAL(works[i].wait().message, "");
          CHECK(sums[i]->result() == Floats(10, 2));
        }
      }
      Sum after(gpu, Floats(10, 1));
      CHECK_EQUAL(after.start(engine, "after").wait().message, "");
      CHECK(after.result() == Floats(10, 3));
    });
    fake.check();
  }
}

TEST(a_joined_rank_brings_zeros_to_the_devices) {
  FakeScope fake;
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    for (const std::int32_t departing : {2, 0, 1}) {
      std::vector<std::unique_ptr<Sum>> sums;
      if (rank != departing) {
        std::vector<TestWork> works;
        for (const std::size_t count : {std::size_t{10}, std::size_t{4000}, std::size_t{7}}) {
          sums.push_back(std::make_unique<Sum>(gpu, Floats(count, static_cast<float>(rank + 1))));
          works.push_back(sums.back()->start(engine, std::to_string(count)));
        }
        for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
        const auto expected = static_cast<float>(6 - (departing + 1));
        for (auto& sum : sums) {
          const std::size_t count = sum->host.size();
          CHECK(sum->result() == Floats(count, expected));
        }
      }
      Request join(SPARKHVD_JOIN, "join");
      CHECK_EQUAL(engine.submit(join.raw()).wait().message, "");
      Sum all(gpu, Floats(5, 1));
      CHECK_EQUAL(all.start(engine, "all").wait().message, "");
      CHECK(all.result() == Floats(5, 3));
    }
  });
  fake.check();
}

TEST(a_rank_that_joins_without_a_device_is_named) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Request join(SPARKHVD_JOIN, "join");
    if (rank == 1) {
      const Status status = engine.submit(join.raw()).wait();
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
      return;
    }
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(3, 1));
    const Status status = sum.start(engine, "x").wait();
    CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_MESSAGE(
        status.message.find("rank 1 has joined without an open device") != std::string::npos,
        status.message);
  });
}

TEST(wait_stream_orders_what_comes_after_without_the_host) {
  FakeScope fake;
  Fake::get().hang("ncclAllReduce@stream", 1);
  std::atomic<int> num_waiting{0};
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(1000, static_cast<float>(rank + 1)));
    TestWork work = sum.start(engine, "x");
    CHECK_EQUAL(gpu.wait_stream(work).message, "");
    CHECK_EQUAL(work.poll(), SPARKHVD_PENDING);  // the device has not run it yet
    if (++num_waiting == 2) {
      Fake::get().reset();
      Fake::get().delay_streams(20000);
    }
    CHECK(sum.result() == Floats(1000, 3));
    CHECK_EQUAL(work.wait().message, "");
  });
  fake.check();
}

TEST(a_name_is_free_when_the_device_has_its_operation) {
  FakeScope fake;
  Fake::get().hang("ncclAllReduce@stream", 1);
  std::atomic<int> num_ahead{0};
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(100, static_cast<float>(rank + 1)));
    std::vector<TestWork> works;
    for (int step = 0; step < 50; ++step) {
      works.push_back(sum.start(engine, "gradients"));
      CHECK_EQUAL(gpu.wait_stream(works.back()).message, "");
    }
    for (auto& work : works) CHECK_EQUAL(work.poll(), SPARKHVD_PENDING);
    if (++num_ahead == 2) Fake::get().reset();
    for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
    CHECK(sum.result() == Floats(100, std::ldexp(3.0F, 49)));
    // Before the launch the name is in use, as for any operation.
    if (rank == 0) {
      Sum other(gpu, Floats(3, 1));
      TestWork first = other.start(engine, "taken");
      Status status;
      other.start(engine, "taken", 0, &status);
      CHECK_MESSAGE(status.message.find("of this name is in flight") != std::string::npos,
                    status.message);
    }
    Request barrier(SPARKHVD_BARRIER, "end");
    CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
  });
  fake.check();
}

TEST(a_host_that_is_a_thousand_operations_ahead_waits_for_the_device) {
  FakeScope fake;
  Fake::get().hang("ncclAllReduce@stream", 1);
  constexpr std::size_t kLimit = 1024;
  run_ranks(world(one_host(1)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(1, 1));
    std::vector<TestWork> works;
    for (std::size_t i = 0; i < kLimit; ++i) {
      works.push_back(sum.start(engine, "x"));
      CHECK_EQUAL(gpu.wait_stream(works.back()).message, "");
    }
    TestWork next = sum.start(engine, "x");
    CHECK_EQUAL(gpu.wait_stream(next, 200).code, SPARKHVD_PENDING);
    Fake::get().reset();
    CHECK_EQUAL(gpu.wait_stream(next).message, "");
    CHECK_EQUAL(next.wait().message, "");
    for (auto& work : works) CHECK_EQUAL(work.poll(), SPARKHVD_OK);
  });
  fake.check();
}

TEST(without_a_wait_between_streams_the_result_is_wrong) {
  // Each operation has two waits: the plane's stream waits for the caller's stream, and the caller's for the plane's.
#if defined(__SANITIZE_THREAD__)
  const int last = 0;  // a skipped wait is a data race, which the sanitizer would report
#else
  const int last = 2;
#endif
  for (int wait = 0; wait <= last; ++wait) {
    FakeScope fake;
    std::atomic<int> num_wrong{0};
    run_ranks(world(one_host(1)), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      Gpu reader(rank);
      Sum first(gpu, Floats(10, 1));
      TestWork work = first.start(engine, "makes the communicator");
      CHECK_EQUAL(gpu.wait_stream(work).message, "");
      gpu.synchronize();
      Fake::get().delay_streams(30000);
      const Floats before(1000, 5);
      std::byte* input = gpu.allocate(4000);
      std::byte* output = gpu.allocate(4000);
      std::memset(input, 0, 4000);
      std::memset(output, 0, 4000);
      const Floats zeros(1000);
      gpu.write(input, zeros.data(), 4000);
      gpu.write(input, zeros.data(), 4000);
      gpu.write(input, before.data(), 4000);
      if (wait > 0) Fake::get().skip_wait(wait);
      Request request(SPARKHVD_ALLREDUCE, "x");
      TestWork skipped = engine.submit(gpu.use(request.tensor(input, output, {1000})));
      // Waits on a stream without other work.
      CHECK_EQUAL(reader.wait_stream(skipped).message, "");
      Floats result(1000);
      reader.read(result.data(), output, 4000);
      reader.synchronize();
      if (result != before) ++num_wrong;
      CHECK_EQUAL(skipped.wait().message, "");
    });
    CHECK_EQUAL(num_wrong, wait == 0 ? 0 : 1);
  }
}

TEST(a_stream_under_capture_is_refused_and_no_capture_is_spoilt) {
  FakeScope fake;
  run_ranks(world(one_host(1)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Gpu other(rank);
    Sum sum(gpu, Floats(10, 2));
    TestWork work = sum.start(engine, "before");
    CHECK_EQUAL(work.wait().message, "");
    std::byte* memory = other.allocate(40);
    CHECK_EQUAL(Fake::get().begin_capture(gpu.stream()), 0);
    Status status;
    sum.start(engine, "captured", 0, &status);
    CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_MESSAGE(status.message.find("is being captured into a CUDA graph") != std::string::npos,
                  status.message);
    CHECK_EQUAL(gpu.wait_stream(work).code, SPARKHVD_INVALID_ARGUMENT);
    // Meanwhile an operation on another stream runs from submission to end.
    Request request(SPARKHVD_ALLREDUCE, "beside");
    TestWork beside = engine.submit(other.use(request.tensor(memory, memory, {10})));
    CHECK_EQUAL(beside.wait().message, "");
    CHECK_EQUAL(Fake::get().end_capture(gpu.stream()), 0);
    CHECK_EQUAL(sum.start(engine, "after").wait().message, "");
  });
  fake.check();
}

TEST(wrong_requests_for_devices_are_refused_here) {
  FakeScope fake;
  run_ranks(world(one_host(1)), [&](TestEngine& engine, std::int32_t rank) {
    const auto refused = [&](Request& request, Gpu& gpu, const std::string& text) {
      Status status;
      engine.submit(gpu.use(request), &status);
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
      CHECK_MESSAGE(status.message.find(text) != std::string::npos, status.message);
    };
    Gpu gpu(rank);
    std::byte* memory = gpu.allocate(64);
    Request early(SPARKHVD_ALLREDUCE, "early");
    refused(early.tensor(memory, memory, {2}), gpu, "device 0 is not open on rank 0");
    CHECK_EQUAL(open_device(engine, 0).message, "");
    CHECK_EQUAL(open_device(engine, 0).message, "");
    CHECK_EQUAL(open_device(engine, 1).code, SPARKHVD_INVALID_ARGUMENT);
    Request average(SPARKHVD_ALLREDUCE, "average");
    average.raw().reduce_op = SPARKHVD_AVERAGE;
    refused(average.tensor(memory, memory, {2}), gpu, "there is no Average");
    Request scaled(SPARKHVD_ALLREDUCE, "scaled");
    scaled.raw().prescale = 0.5;
    refused(scaled.tensor(memory, memory, {2}), gpu, "prescale and postscale must be 1");
    Request halves(SPARKHVD_REDUCESCATTER, "shorts", SPARKHVD_INT16);
    refused(halves.tensor(memory, memory, {2}), gpu, "NCCL does not reduce int16");
    Request barrier(SPARKHVD_BARRIER, "barrier");
    refused(barrier, gpu, "it takes no device");
    Request one_piece(SPARKHVD_REGISTER, "one piece");
    refused(one_piece.numbers({100, 1}), gpu, "no common piece");
    TestWork cpu = engine.submit(Request(SPARKHVD_BARRIER, "cpu").raw());
    CHECK_EQUAL(gpu.wait_stream(cpu).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(cpu.wait().message, "");
  });
  fake.check();
}

TEST(ranks_that_disagree_about_devices_are_told_and_go_on) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(rank == 0 ? 10 : 11, 1));
    const Status shape = sum.start(engine, "shape").wait();
    CHECK_EQUAL(shape.code, SPARKHVD_MISMATCH);
    Floats data(10, 1);
    Request request(SPARKHVD_ALLREDUCE, "place");
    request.tensor(data.data(), data.data(), {10});
    const Status place = engine.submit(rank == 0 ? request.raw() : gpu.use(request)).wait();
    CHECK_EQUAL(place.code, SPARKHVD_MISMATCH);
    CHECK_MESSAGE(place.message.find("Rank 0 sent tensors in CPU memory, rank 1 sent tensors on "
                                     "its GPU") != std::string::npos,
                  place.message);
    Sum after(gpu, Floats(10, 1));
    CHECK_EQUAL(after.start(engine, "after").wait().message, "");
    CHECK(after.result() == Floats(10, 2));
  });
  fake.check();
}

}  // namespace sparkhvd::test::device_test
