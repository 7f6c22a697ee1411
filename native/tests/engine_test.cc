// The engine through its C interface, with ranks as threads: in shared memory, over sockets, and mixed.
#include <dirent.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

#include "world.h"

namespace sparkhvd::test::engine_test {
namespace {

using Floats = std::vector<float>;
using Losses = std::vector<std::pair<std::int32_t, std::int32_t>>;

struct Layout {
  const char* name;
  std::vector<std::int32_t> hosts;
  bool use_shared_memory = true;
};

/// Layouts: one host with and without shared memory, several hosts of one rank, and hosts of unequal size.
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
      // 4096-byte slots: 1024 elements each.
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

TEST(allreduce_gives_equal_bits_on_every_rank_and_layout_of_one_host) {
  // The values are inexact, so the result depends on the order of addition. Shared memory and sockets must add in the
  // same order.
  const std::size_t count = 50021;
  for (const std::int32_t dtype : {SPARKHVD_FLOAT32, SPARKHVD_BFLOAT16}) {
    std::vector<std::vector<std::uint16_t>> results;
    for (const bool use_shared_memory : {true, false}) {
      WorldOptions options;
      options.hosts = one_host(3);
      options.use_shared_memory = use_shared_memory;
      const std::size_t words = dtype == SPARKHVD_FLOAT32 ? count * 2 : count;
      std::vector<std::vector<std::uint16_t>> outputs(3, std::vector<std::uint16_t>(words));
      run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
        std::mt19937 random(static_cast<unsigned>(rank));
        std::vector<std::uint16_t> input(words);
        for (std::size_t i = 0; i < words; ++i) {
          // Exponents near 1 in the upper half of a float32 and in a bfloat16.
          input[i] = static_cast<std::uint16_t>(0x3f00 + random() % 0x100);
        }
        auto& output = outputs[static_cast<std::size_t>(rank)];
        Request request(SPARKHVD_ALLREDUCE, "bits", dtype);
        request.tensor(input.data(), output.data(), {static_cast<std::int64_t>(count)});
        request.raw().reduce_op = SPARKHVD_AVERAGE;
        CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
      });
      for (const auto& output : outputs) results.push_back(output);
    }
    for (const auto& result : results) CHECK(result == results[0]);
  }
}

TEST(allreduce_takes_a_list_of_tensors_in_place) {
  for (const auto& layout : layouts()) {
    const auto size = layout.hosts.size();
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
      const std::vector<std::size_t> counts{3, 0, 1000, 1, 5000, 17, 4096};
      std::vector<Floats> tensors;
      Request request(SPARKHVD_ALLREDUCE, "list");
      for (const std::size_t count : counts) tensors.push_back(input_of(rank, count));
      for (auto& tensor : tensors) {
        request.tensor(tensor.data(), tensor.data(), {static_cast<std::int64_t>(tensor.size())});
      }
      request.raw().reduce_op = SPARKHVD_AVERAGE;
      request.raw().prescale = static_cast<double>(size);
      const Status status = engine.submit(request.raw()).wait();
      CHECK_MESSAGE(status.code == SPARKHVD_OK, status.message);
      for (const auto& tensor : tensors) {
        for (std::size_t i = 0; i < tensor.size(); ++i) {
          float expected = 0;
          for (std::size_t r = 0; r < size; ++r) expected += value(static_cast<std::int32_t>(r), i);
          const bool close = std::abs(tensor[i] - expected) <= 1e-4F * std::abs(expected);
          CHECK_MESSAGE(close, text_of(layout, tensor.size()));
        }
      }
    });
  }
}

TEST(allreduce_knows_every_reduction_on_every_layout) {
  for (const auto& layout : layouts()) {
    const auto size = layout.hosts.size();
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
      const std::size_t count = 3001;
      for (const std::int32_t op :
           {SPARKHVD_MIN, SPARKHVD_MAX, SPARKHVD_PRODUCT, SPARKHVD_AVERAGE}) {
        std::vector<std::int64_t> input(count);
        std::vector<std::int64_t> output(count);
        const auto at = [](std::int32_t r, std::size_t i) {
          return static_cast<std::int64_t>((i + static_cast<std::size_t>(r) * 5) % 11) - 5;
        };
        for (std::size_t i = 0; i < count; ++i) input[i] = at(rank, i);
        Request request(SPARKHVD_ALLREDUCE, "op " + std::to_string(op), SPARKHVD_INT64);
        request.tensor(input.data(), output.data(), {3001});
        request.raw().reduce_op = op;
        const Status status = engine.submit(request.raw()).wait();
        CHECK_MESSAGE(status.code == SPARKHVD_OK, status.message);
        for (std::size_t i = 0; i < count; ++i) {
          std::int64_t expected = at(0, i);
          for (std::size_t r = 1; r < size; ++r) {
            const auto next = at(static_cast<std::int32_t>(r), i);
            if (op == SPARKHVD_MIN) expected = std::min(expected, next);
            if (op == SPARKHVD_MAX) expected = std::max(expected, next);
            if (op == SPARKHVD_PRODUCT) expected *= next;
            if (op == SPARKHVD_AVERAGE) expected += next;
          }
          if (op == SPARKHVD_AVERAGE) {
            expected /= static_cast<std::int64_t>(size);
          }
          CHECK_MESSAGE(output[i] == expected,
                        text_of(layout, count) + ", op " + std::to_string(op));
        }
      }
    });
  }
}

TEST(allreduce_halves_or_uses_a_ring_beyond_16_islands) {
  WorldOptions options;
  options.hosts.resize(18);
  std::iota(options.hosts.begin(), options.hosts.end(), 0);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    for (const std::size_t count : {1, 19, 4099, 100003, 300007}) {
      const Floats input = input_of(rank, count);
      Floats output(count);
      const Status status = allreduce(engine, "ring", input, output);
      CHECK_MESSAGE(status.code == SPARKHVD_OK, status.message);
      for (std::size_t i = 0; i < count; ++i) {
        float expected = 0;
        for (std::int32_t r = 0; r < 18; ++r) expected += value(r, i);
        CHECK_EQUAL(output[i], expected);
      }
    }
  });
}

TEST(hosts_exchange_over_tcp) {
  for (const auto& hosts :
       std::vector<std::vector<std::int32_t>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 2}}) {
    WorldOptions options;
    options.hosts = hosts;
    options.use_tcp = true;
    options.slot_bytes = 64 << 10;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const std::size_t count = 1000003;
      Floats data = input_of(rank, count);
      for (int round = 0; round < 3; ++round) {
        const Floats before = data;
        CHECK_EQUAL(allreduce(engine, "x", before, data, SPARKHVD_MAX).message, "");
      }
      for (std::size_t i = 0; i < count; ++i) {
        float expected = 0;
        for (std::size_t r = 0; r < hosts.size(); ++r) {
          expected = std::max(expected, value(static_cast<std::int32_t>(r), i));
        }
        CHECK_EQUAL(data[i], expected);
      }
    });
  }
}

TEST(allgather_concatenates_unequal_first_dimensions) {
  for (const auto& layout : layouts()) {
    const auto size = static_cast<std::int32_t>(layout.hosts.size());
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
      for (const std::int64_t scale : {0, 1, 1000}) {
        const auto rows_of = [&](std::int32_t r) { return scale * (r % 3); };
        const auto rows = rows_of(rank);
        Floats input(static_cast<std::size_t>(rows * 3), static_cast<float>(rank));
        Request request(SPARKHVD_ALLGATHER, "gather");
        request.tensor(input.data(), nullptr, {rows, 3});
        const TestWork work = engine.submit(request.raw());
        CHECK_EQUAL(const_cast<TestWork&>(work).wait().message, "");
        sparkhvd_output output{};
        output.struct_size = sizeof(output);
        CHECK(sparkhvd_work_output(work.get(), &output, nullptr, 0) == SPARKHVD_OK);
        CHECK_EQUAL(output.num_rows, static_cast<std::uint32_t>(size));
        const auto* data = static_cast<const float*>(output.data);
        std::size_t at = 0;
        for (std::int32_t r = 0; r < size; ++r) {
          CHECK_EQUAL(output.rows[r], rows_of(r));
          for (std::int64_t i = 0; i < rows_of(r) * 3; ++i) {
            CHECK_MESSAGE(data[at++] == static_cast<float>(r), layout.name);
          }
        }
        CHECK_EQUAL(output.num_bytes, at * 4);
      }
    });
  }
}

TEST(broadcast_copies_the_root_from_every_root) {
  for (const auto& layout : layouts()) {
    const auto size = static_cast<std::int32_t>(layout.hosts.size());
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
      for (std::int32_t root = 0; root < size; ++root) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{30011}}) {
          const Floats input = input_of(rank, count);
          Floats output(count, -1);
          Request request(SPARKHVD_BROADCAST, "root " + std::to_string(root));
          request.tensor(input.data(), output.data(), {static_cast<std::int64_t>(count)});
          request.raw().root_rank = root;
          CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
          CHECK_MESSAGE(output == input_of(root, count), text_of(layout, count));
        }
      }
    });
  }
}

TEST(barrier_ends_only_when_all_have_come) {
  for (const auto& layout : layouts()) {
    std::atomic<int> arrived{0};
    const auto size = static_cast<int>(layout.hosts.size());
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t) {
      ++arrived;
      Request request(SPARKHVD_BARRIER, "barrier");
      CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
      CHECK_EQUAL(arrived.load(), size);
    });
  }
}

TEST(operations_match_by_name_when_ranks_only_poll) {
  for (const bool use_shared_memory : {true, false}) {
    WorldOptions options;
    options.hosts = one_host(2);
    options.use_shared_memory = use_shared_memory;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      std::vector<Floats> data{Floats(40000, 1), Floats(10, 2)};
      std::vector<TestWork> works;
      for (const std::size_t which : {rank == 0 ? 0U : 1U, rank == 0 ? 1U : 0U}) {
        Request request(SPARKHVD_ALLREDUCE, which == 0 ? "A" : "B");
        request.tensor(data[which].data(), data[which].data(),
                       {static_cast<std::int64_t>(data[which].size())});
        works.push_back(engine.submit(request.raw()));
      }
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      for (auto& work : works) {
        while (work.poll() == SPARKHVD_PENDING && std::chrono::steady_clock::now() < end) {
          std::this_thread::yield();
        }
        CHECK_EQUAL(work.poll(), SPARKHVD_OK);
      }
      CHECK(data[0] == Floats(40000, 2));
      CHECK(data[1] == Floats(10, 4));
    });
  }
}

TEST(a_pending_operation_blocks_no_other) {
  WorldOptions options;
  options.hosts = one_host(2);
  std::barrier<> together(2);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    Floats waiting(10, 1);
    Request early(SPARKHVD_ALLREDUCE, "waits for rank 1");
    early.tensor(waiting.data(), waiting.data(), {10});
    std::vector<TestWork> works;
    if (rank == 0) works.push_back(engine.submit(early.raw()));
    const Floats input(100, 1);
    Floats output(100);
    CHECK_EQUAL(allreduce(engine, "other", input, output).message, "");
    together.arrive_and_wait();
    if (rank == 1) works.push_back(engine.submit(early.raw()));
    CHECK_EQUAL(works[0].wait().message, "");
    CHECK(waiting == Floats(10, 2));
  });
}

TEST(several_threads_of_a_rank_may_wait_at_once) {
  WorldOptions options;
  options.hosts = one_host(2);
  run_ranks(options, [&](TestEngine& engine, std::int32_t) {
    std::vector<std::string> problems(4);
    {
      std::vector<std::jthread> threads;
      for (std::size_t t = 0; t < problems.size(); ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; i < 50; ++i) {
            const Floats input(200 * t + 1, 1);
            Floats output(input.size());
            const auto status =
                allreduce(engine, std::to_string(t) + "." + std::to_string(i), input, output);
            if (status.code != SPARKHVD_OK) problems[t] = status.message;
            if (output[0] != 2) problems[t] += " wrong";
          }
        });
      }
    }
    for (const auto& problem : problems) CHECK_EQUAL(problem, "");
  });
}

TEST(mismatches_name_both_sides_and_leave_the_engine_usable) {
  WorldOptions options;
  options.hosts = one_host(3);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    Floats data(128 * 64);
    Request shape(SPARKHVD_ALLREDUCE, "layer3.weight");
    shape.tensor(data.data(), data.data(), {128, rank == 2 ? 32 : 64});
    Status status = engine.submit(shape.raw()).wait();
    CHECK_EQUAL(status.code, SPARKHVD_MISMATCH);
    CHECK_EQUAL(
        status.message,
        "allreduce('layer3.weight'): ranks disagree on shape. Rank 0 sent (128, 64) float32, "
        "rank 2 sent (128, 32) float32. Build the same model on every rank, or give the two "
        "tensors different names.");
    Request root(SPARKHVD_BROADCAST, "weights");
    root.tensor(data.data(), data.data(), {5});
    root.raw().root_rank = rank == 1 ? 1 : 0;
    status = engine.submit(root.raw()).wait();
    CHECK_EQUAL(status.code, SPARKHVD_MISMATCH);
    CHECK_EQUAL(
        status.message,
        "broadcast('weights'): ranks disagree on the root rank. Rank 0 sent 0, rank 1 sent 1. "
        "Make the same call on every rank, or use different names.");
    const Floats input(10, 1);
    Floats output(10);
    CHECK_EQUAL(allreduce(engine, "after", input, output).message, "");
    CHECK(output == Floats(10, 3));
  });
}

TEST(a_name_in_flight_is_refused_at_once) {
  WorldOptions options;
  options.hosts = one_host(2);
  std::barrier<> together(2);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    Floats data(10, 1);
    Request request(SPARKHVD_ALLREDUCE, "grad");
    request.tensor(data.data(), data.data(), {10});
    if (rank == 1) together.arrive_and_wait();
    TestWork work = engine.submit(request.raw());
    if (rank == 0) {
      Status status;
      const TestWork second = engine.submit(request.raw(), &status);
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
      CHECK_EQUAL(
          status.message,
          "allreduce('grad'): an operation of this name is in flight on this rank. Wait for "
          "it, or use another name.");
      together.arrive_and_wait();
    }
    CHECK_EQUAL(work.wait().message, "");
  });
}

TEST(bad_requests_are_refused_with_a_sentence) {
  WorldOptions options;
  options.hosts = one_host(1);
  run_ranks(options, [&](TestEngine& engine, std::int32_t) {
    Floats data(4, 1);
    const auto refused = [&](auto change, std::int32_t dtype = SPARKHVD_FLOAT32) {
      Request request(SPARKHVD_ALLREDUCE, "x", dtype);
      request.tensor(data.data(), data.data(), {4});
      sparkhvd_request raw = request.raw();
      change(raw);
      Status status;
      const TestWork work = engine.submit(raw, &status);
      return status;
    };
    CHECK_EQUAL(refused([](auto& raw) { raw.process_set = 3; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.collective = SPARKHVD_BARRIER; }).message,
                "barrier('x'): num_tensors is 1, but must be 0.");
    CHECK_EQUAL(refused([](auto& raw) { raw.reduce_op = SPARKHVD_ADASUM; }, SPARKHVD_INT32).code,
                SPARKHVD_INVALID_ARGUMENT);
    const std::int64_t splits[] = {5};
    CHECK_EQUAL(
        refused([&](auto& raw) {
          raw.collective = SPARKHVD_ALLTOALL;
          raw.splits = splits;
          raw.num_splits = 1;
        }).message,
        "alltoall('x'): the splits are [5]; they must be 0 or more, and their sum at most the "
        "first dimension, 4.");
    CHECK_EQUAL(refused([](auto& raw) { raw.reduce_op = 77; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.reduce_op = SPARKHVD_AVERAGE; }, SPARKHVD_BOOL).code,
                SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.device = 0; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.name = nullptr; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.name = ""; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.dtype = -1; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) { raw.struct_size = 0; }).code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(refused([](auto& raw) {
                  raw.collective = SPARKHVD_BROADCAST;
                  raw.root_rank = 1;
                }).message,
                "broadcast('x'): root_rank 1 is not in the process set, which has rank 0. It is a "
                "global rank.");
    CHECK_EQUAL(allreduce(engine, "fine", data, data).message, "");
  });
}

namespace {

/// Status of an allreduce: of the submission if it fails, else of the wait.
Status try_allreduce(TestEngine& engine, const std::string& name, Floats& data) {
  Request request(SPARKHVD_ALLREDUCE, name);
  request.tensor(data.data(), data.data(), {static_cast<std::int64_t>(data.size())});
  Status status;
  TestWork work = engine.submit(request.raw(), &status);
  return status.code == SPARKHVD_OK ? work.wait() : status;
}

}  // namespace

TEST(a_killed_process_is_named_on_every_other_rank) {
  for (const auto& layout : layouts()) {
    if (layout.hosts.size() < 2) continue;
    const auto options = world(layout);
    const auto size = layout.hosts.size();
    auto sockets = connect_all(size);
    const auto victim = static_cast<std::int32_t>(size) - 1;
    // The victim is a process, forked while there is only one thread. It takes part in two operations and then dies.
    const pid_t child = ::fork();
    if (child == 0) {
      for (std::size_t i = 0; i + 1 < size; ++i) close_all(sockets[i]);
      TestEngine engine(options, victim, sockets.back());
      Floats data(50000, 1);
      try_allreduce(engine, "0", data);
      try_allreduce(engine, "1", data);
      ::kill(::getpid(), SIGKILL);
    }
    CHECK(child > 0);
    close_all(sockets.back());
    std::vector<std::string> problems(size);
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i + 1 < size; ++i) {
        threads.emplace_back([&, i] {
          try {
            TestEngine engine(options, static_cast<std::int32_t>(i), sockets[i]);
            CHECK_EQUAL(engine.created().message, "");
            Floats data(50000, 1);
            Status status;
            auto start = std::chrono::steady_clock::now();
            for (int round = 0; status.code == SPARKHVD_OK; ++round) {
              CHECK(round < 3);
              start = std::chrono::steady_clock::now();
              status = try_allreduce(engine, std::to_string(round), data);
            }
            const auto took = std::chrono::steady_clock::now() - start;
            CHECK_EQUAL(status.code, SPARKHVD_PEER_LOST);
            const std::string name = "rank " + std::to_string(victim) + " is lost";
            CHECK_MESSAGE(status.message.find(name) != std::string::npos, status.message);
            CHECK(took < std::chrono::seconds(2));
            CHECK_EQUAL(try_allreduce(engine, "later", data).code, SPARKHVD_PEER_LOST);
            // The loss is also known on ranks that only heard of it from another rank.
            CHECK(engine.losses() == (Losses{{victim, SPARKHVD_DEAD}}));
          } catch (const std::exception& error) {
            problems[i] = error.what();
          }
        });
      }
    }
    ::waitpid(child, nullptr, 0);
    for (const auto& problem : problems) {
      CHECK_MESSAGE(problem.empty(), layout.name + (": " + problem));
    }
  }
}

TEST(a_process_stopped_inside_an_operation_is_named_after_the_timeout) {
  WorldOptions options;
  options.hosts = one_host(2);
  options.stall_shutdown_s = 0.5;
  auto sockets = connect_all(2);
  // Under a sanitizer a process needs longer to fill the memory than the operation's timeout. So this waits for it
  // outside of the engine.
  int filled[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, filled) == 0);
  const auto both_have_filled = [](int end) {
    char byte = 0;
    return ::write(end, &byte, 1) == 1 && ::read(end, &byte, 1) == 1;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    close_all(sockets[0]);
    ::close(filled[0]);
    TestEngine engine(options, 1, sockets[1]);
    Floats data(16 << 20, 1);
    if (!both_have_filled(filled[1])) ::_exit(1);
    Request request(SPARKHVD_ALLREDUCE, "x");
    request.tensor(data.data(), data.data(), {16 << 20});
    TestWork work = engine.submit(request.raw());
    work.wait(3);  // far less than the operation takes with slots of one page
    ::kill(::getpid(), SIGSTOP);
    ::_exit(0);
  }
  CHECK(child > 0);
  close_all(sockets[1]);
  ::close(filled[1]);
  {
    TestEngine engine(options, 0, sockets[0]);
    Floats data(16 << 20, 1);
    CHECK(both_have_filled(filled[0]));
    const Status status = try_allreduce(engine, "x", data);
    CHECK_EQUAL(status.code, SPARKHVD_TIMEOUT);
    CHECK_MESSAGE(
        status.message.find("rank 0 waited 0.5 s for rank 1, which took part but stopped") !=
            std::string::npos,
        status.message);
    // A stopped rank may continue later: the engine has failed, and its memory is never reused.
    CHECK_EQUAL(try_allreduce(engine, "y", data).code, SPARKHVD_TIMEOUT);
    CHECK(engine.losses() == (Losses{{1, SPARKHVD_SILENT}}));
  }
  ::close(filled[0]);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(a_rank_that_shuts_down_is_named_and_finished_work_survives) {
  for (const auto& layout : layouts()) {
    const auto size = static_cast<std::int32_t>(layout.hosts.size());
    if (size < 2) continue;
    for (const std::int32_t departing : {0, size - 1}) {
      std::barrier<> together(size - 1);
      run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
        Status before;
        float last = 0;
        for (int i = 0; i < 5 && before.code == SPARKHVD_OK; ++i) {
          Floats data(20000, 1);
          before = try_allreduce(engine, "before", data);
          last = data[19999];
        }
        if (rank == departing) {
          CHECK_EQUAL(before.message, "");
          CHECK_EQUAL(last, static_cast<float>(size));
          CHECK_EQUAL(engine.shutdown().code, SPARKHVD_OK);
          Floats data(10, 1);
          CHECK_EQUAL(try_allreduce(engine, "own", data).code, SPARKHVD_SHUT_DOWN);
          return;
        }
        Floats data(10, 1);
        const Status status = try_allreduce(engine, "after", data);
        const Losses losses = engine.losses();
        // No other rank has left yet. The checks come after the barrier: a rank that throws before it would let the
        // other ranks wait here forever.
        together.arrive_and_wait();
        CHECK_EQUAL(before.message, "");
        CHECK_EQUAL(last, static_cast<float>(size));
        CHECK_EQUAL(status.code, SPARKHVD_SHUT_DOWN);
        CHECK(losses == (Losses{{departing, SPARKHVD_LEFT}}));
        CHECK_EQUAL(status.message, "allreduce('after'): rank " + std::to_string(departing) +
                                        " shut down before it, and it needs every rank. Call "
                                        "shutdown() on a rank only after its last operation.");
      });
    }
  }
}

TEST(abort_fails_every_rank_with_the_reason) {
  WorldOptions options;
  options.hosts = one_host(3);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    Floats data(10, 1);
    if (rank == 1) {
      engine.abort("the loss is NaN");
      CHECK_EQUAL(try_allreduce(engine, "x", data).code, SPARKHVD_SHUT_DOWN);
      return;
    }
    const Status status = try_allreduce(engine, "x", data);
    CHECK_EQUAL(status.code, SPARKHVD_PEER_LOST);
    CHECK_EQUAL(status.message, "allreduce('x'): rank 1 aborted: the loss is NaN");
    CHECK(engine.losses().empty());
  });
}

TEST(a_rank_that_does_not_come_is_named_after_the_timeout) {
  WorldOptions options;
  options.hosts = one_host(3);
  std::barrier<> together(3);
  std::barrier<> submitted(2);
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    Floats data(10, 1);
    Request request(SPARKHVD_ALLREDUCE, "late");
    request.tensor(data.data(), data.data(), {10});
    if (rank != 1) {
      // Rank 2 submits last, with a short timeout, so both ranks have submitted when the operation fails.
      if (rank == 2) {
        submitted.arrive_and_wait();
        request.raw().timeout_s = 0.1;
      }
      TestWork work = engine.submit(request.raw());
      if (rank == 0) submitted.arrive_and_wait();
      const Status status = work.wait();
      CHECK_EQUAL(status.code, SPARKHVD_TIMEOUT);
      const std::string begin = "allreduce('late'): rank 1 did not submit it within ";
      CHECK_MESSAGE(status.message.starts_with(begin), status.message);
      const double waited = std::stod(status.message.substr(begin.size()));
      CHECK_MESSAGE(waited >= 0.1 && waited < 3, status.message);
      CHECK(status.message.find("ranks 0 and 2 waited") != std::string::npos);
    }
    together.arrive_and_wait();
    // The late rank gets the same error, and the engine stays usable.
    if (rank == 1) CHECK_EQUAL(engine.submit(request.raw()).wait().code, SPARKHVD_TIMEOUT);
    together.arrive_and_wait();
    request.raw().timeout_s = -1;
    CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
  });
}

TEST(a_rank_that_never_starts_is_named) {
  WorldOptions options;
  options.hosts = one_host(2);
  options.connect_timeout_s = 0.1;
  auto sockets = connect_all(2);
  const TestEngine engine(options, 0, sockets[0]);
  close_all(sockets[1]);
  CHECK_EQUAL(engine.created().code, SPARKHVD_TIMEOUT);
  CHECK_MESSAGE(engine.created().message.starts_with("rank 1 did not start an engine within"),
                engine.created().message);
}

TEST(a_rank_that_dies_while_starting_is_named) {
  WorldOptions options;
  options.hosts = one_host(2);
  auto sockets = connect_all(2);
  close_all(sockets[1]);
  const TestEngine engine(options, 0, sockets[0]);
  CHECK_EQUAL(engine.created().code, SPARKHVD_PEER_LOST);
  CHECK_MESSAGE(engine.created().message.starts_with("rank 1 is lost"), engine.created().message);
}

TEST(nonsense_from_a_peer_names_it) {
  for (const std::string& nonsense :
       {std::string("\xff\xff\xff\x7f\x03\0\0\0", 8), std::string("\x04\0\0\0\x63\0\0\0abcd", 12),
        std::string("\x01\0\0\0\x04\0\0\0a", 9)}) {
    WorldOptions options;
    options.hosts = one_host(2);
    auto sockets = connect_all(2);
    const int spy = ::dup(sockets[1][0]);
    std::string problem;
    {
      std::jthread other([&] {
        TestEngine engine(options, 1, sockets[1]);
        std::this_thread::yield();
        Floats data(10, 1);
        try_allreduce(engine, "x", data);
      });
      TestEngine engine(options, 0, sockets[0]);
      CHECK_EQUAL(engine.created().message, "");
      CHECK(::send(spy, nonsense.data(), nonsense.size(), 0) > 0);
      Floats data(10, 1);
      Status status;
      for (int i = 0; i < 1000 && status.code == SPARKHVD_OK; ++i) {
        status = try_allreduce(engine, "x", data);
      }
      if (status.code != SPARKHVD_PEER_LOST) problem = "status " + std::to_string(status.code);
      if (status.message.find("rank 1 is lost: it sent") == std::string::npos)
        problem += status.message;
    }
    ::close(spy);
    CHECK_EQUAL(problem, "");
  }
}

namespace {

int count_entries(const char* folder) {
  DIR* directory = ::opendir(folder);
  if (directory == nullptr) return -1;
  int count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

}  // namespace

TEST(engines_leave_no_descriptor_and_no_thread) {
  WorldOptions options;
  options.hosts = one_host(2);
  const auto once = [&] {
    run_ranks(options, [](TestEngine& engine, std::int32_t) {
      Floats data(10, 1);
      CHECK_EQUAL(try_allreduce(engine, "x", data).message, "");
    });
  };
  once();
  const int descriptors = count_entries("/proc/self/fd");
  const int threads = count_entries("/proc/self/task");
  for (int i = 0; i < 200; ++i) once();
  CHECK_EQUAL(count_entries("/proc/self/fd"), descriptors);
  // A joined thread stays in /proc for a moment, longest under an emulator, so the first count may be too high by 1. A
  // leak would be 200 threads and more.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (count_entries("/proc/self/task") > threads &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(count_entries("/proc/self/task") <= threads);
}

TEST(random_operations_in_random_order_are_all_right) {
  for (const auto& layout : layouts()) {
    if (layout.hosts.size() < 2) continue;
    const auto size = layout.hosts.size();
    run_ranks(world(layout), [&](TestEngine& engine, std::int32_t rank) {
      // The same operations on every rank, submitted in a different order on each rank.
      std::mt19937 shared(42);
      const std::size_t operations = 60;
      std::vector<Floats> data;
      for (std::size_t i = 0; i < operations; ++i) data.push_back(input_of(rank, shared() % 6000));
      std::vector<std::size_t> order(operations);
      std::iota(order.begin(), order.end(), 0U);
      std::mt19937 own(static_cast<unsigned>(rank) + 1);
      std::shuffle(order.begin(), order.end(), own);
      std::vector<std::pair<std::size_t, TestWork>> works;
      for (const std::size_t which : order) {
        Request request(which % 3 == 2 ? SPARKHVD_BROADCAST : SPARKHVD_ALLREDUCE,
                        "op " + std::to_string(which));
        request.tensor(data[which].data(), data[which].data(),
                       {static_cast<std::int64_t>(data[which].size())});
        request.raw().root_rank = static_cast<std::int32_t>(which % size);
        works.emplace_back(which, engine.submit(request.raw()));
        if (own() % 4 == 0) works.back().second.wait(0);
      }
      std::shuffle(works.begin(), works.end(), own);
      for (auto& [which, work] : works) CHECK_EQUAL(work.wait().message, "");
      for (std::size_t which = 0; which < operations; ++which) {
        for (std::size_t i = 0; i < data[which].size(); ++i) {
          float expected = value(static_cast<std::int32_t>(which % size), i);
          if (which % 3 != 2) {
            expected = 0;
            for (std::size_t r = 0; r < size; ++r)
              expected += value(static_cast<std::int32_t>(r), i);
          }
          CHECK_EQUAL(data[which][i], expected);
        }
      }
    });
  }
}

}  // namespace sparkhvd::test::engine_test
