// Process sets, join, registered memory, and settings that change between operations, through the C interface with
// ranks as threads.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <limits>
#include <numeric>
#include <random>

#include "world.h"

namespace sparkhvd::test::process_set_test {
namespace {

using Floats = std::vector<float>;
using Ranks = std::vector<std::int64_t>;

const std::vector<std::vector<std::int32_t>> kLayouts{
    {0, 0, 0, 0}, {0, 1, 2, 3}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1}};

WorldOptions world(std::vector<std::int32_t> hosts) {
  WorldOptions options;
  options.hosts = std::move(hosts);
  return options;
}

Status run(TestEngine& engine, Request& request) { return engine.submit(request.raw()).wait(); }

std::int32_t add_process_set(TestEngine& engine, const Ranks& ranks) {
  Request request(SPARKHVD_ADD_PROCESS_SET, "add");
  TestWork work = engine.submit(request.numbers(ranks).raw());
  CHECK_EQUAL(work.wait().message, "");
  return static_cast<std::int32_t>(result_of(work).rows.at(0));
}

bool contains(const Ranks& ranks, std::int32_t rank) { return std::ranges::count(ranks, rank) > 0; }

Status sum(TestEngine& engine, const std::string& name, Floats& data, std::int32_t process_set = 0,
           std::int32_t op = SPARKHVD_SUM) {
  Request request(SPARKHVD_ALLREDUCE, name);
  request.tensor(data.data(), data.data(), {static_cast<std::int64_t>(data.size())});
  request.on(process_set).raw().reduce_op = op;
  return run(engine, request);
}

class Buffer {
 public:
  Buffer(TestEngine& engine, std::int64_t bytes, std::int32_t process_set = 0,
         bool is_one_piece = false) {
    Request request(SPARKHVD_REGISTER, "register");
    TestWork work =
        engine.submit(request.numbers({bytes, is_one_piece ? 1 : 0}).on(process_set).raw());
    CHECK_EQUAL(work.wait().message, "");
    char text[1024] = "";
    CHECK_MESSAGE(sparkhvd_work_buffer(work.get(), &buffer_, text, sizeof(text)) == SPARKHVD_OK,
                  text);
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { sparkhvd_buffer_release(buffer_); }
  float* data() { return static_cast<float*>(sparkhvd_buffer_data(buffer_)); }
  bool is_shared() { return sparkhvd_buffer_is_shared(buffer_) == 1; }

 private:
  sparkhvd_buffer* buffer_ = nullptr;
};

}  // namespace

TEST(one_piece_of_memory_is_every_rank_of_the_hosts) {
  for (const auto& hosts : kLayouts) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      const auto barrier = [&](const char* name) {
        Request request(SPARKHVD_BARRIER, name);
        CHECK_EQUAL(run(engine, request).message, "");
      };
      const auto me = static_cast<std::size_t>(rank);
      Buffer buffer(engine, 100000, 0, true);
      CHECK(buffer.is_shared());
      buffer.data()[me] = static_cast<float>(rank + 1);
      barrier("written");
      for (std::size_t other = 0; other < hosts.size(); ++other) {
        const bool is_mate = hosts[other] == hosts[me];
        CHECK_EQUAL(buffer.data()[other], is_mate ? static_cast<float>(other + 1) : 0.0F);
      }
      barrier("read");
      // The ranks share one piece, so the engine cannot reduce in it. Allreduces of private tensors still work.
      Floats own(7, static_cast<float>(rank));
      CHECK_EQUAL(sum(engine, "x", own).message, "");
      const auto last = static_cast<float>(hosts.size() - 1);
      CHECK(own == Floats(7, last * (last + 1) / 2));
    });
  }
}

TEST(process_sets_reduce_among_their_ranks_only) {
  for (const auto& hosts : kLayouts) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      for (const Ranks& ranks : {Ranks{0, 1}, Ranks{1, 3}, Ranks{2}, Ranks{0, 1, 2, 3}}) {
        const std::int32_t id = add_process_set(engine, ranks);
        CHECK(id > 0);
        for (const std::size_t count : {std::size_t{1}, std::size_t{5000}, std::size_t{100003}}) {
          if (!contains(ranks, rank)) continue;
          Floats data(count, static_cast<float>(rank + 1));
          CHECK_EQUAL(sum(engine, "x", data, id).message, "");
          float expected = 0;
          for (const auto r : ranks) expected += static_cast<float>(r + 1);
          CHECK(data == Floats(count, expected));
        }
        if (!contains(ranks, rank)) {
          Floats data(3);
          Request request(SPARKHVD_ALLREDUCE, "x");
          request.tensor(data.data(), data.data(), {3}).on(id);
          Status status;
          engine.submit(request.raw(), &status);
          CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
          CHECK_MESSAGE(status.message.find("is not in process set") != std::string::npos,
                        status.message);
        }
      }
    });
  }
}

TEST(overlapping_process_sets_work_at_the_same_time_in_different_orders) {
  for (const auto& hosts : kLayouts) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      const std::vector<Ranks> sets{{0, 1, 2}, {1, 2, 3}, {0, 1, 2, 3}};
      std::vector<std::int32_t> ids{};
      for (const auto& ranks : sets) ids.push_back(add_process_set(engine, ranks));
      for (int round = 0; round < 20; ++round) {
        std::vector<Floats> data(sets.size(), Floats(20011, static_cast<float>(rank)));
        std::vector<TestWork> works;
        std::vector<std::size_t> mine;
        for (std::size_t i = 0; i < sets.size(); ++i) {
          // Every rank begins with a different set.
          const std::size_t which = (i + static_cast<std::size_t>(rank + round)) % sets.size();
          if (!contains(sets[which], rank)) continue;
          Request request(SPARKHVD_ALLREDUCE, "same name");
          request.tensor(data[which].data(), data[which].data(), {20011}).on(ids[which]);
          works.push_back(engine.submit(request.raw()));
          mine.push_back(which);
        }
        for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
        for (const auto which : mine) {
          float expected = 0;
          for (const auto r : sets[which]) expected += static_cast<float>(r);
          CHECK(data[which] == Floats(20011, expected));
        }
      }
    });
  }
}

TEST(a_process_set_that_waits_does_not_stop_another) {
  std::atomic<bool> others_are_done{false};
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    const auto pair = add_process_set(engine, {0, 1});
    const auto all = add_process_set(engine, {0, 1, 2});
    if (rank == 2) {
      while (!others_are_done) std::this_thread::yield();
      Floats late(10, 1);
      CHECK_EQUAL(sum(engine, "late", late, all).message, "");
      return;
    }
    Floats waiting(10, 1);
    Request request(SPARKHVD_ALLREDUCE, "late");
    request.tensor(waiting.data(), waiting.data(), {10}).on(all);
    TestWork pending = engine.submit(request.raw());
    for (int i = 0; i < 50; ++i) {
      Floats data(1000, 1);
      CHECK_EQUAL(sum(engine, "now", data, pair).message, "");
      CHECK(data == Floats(1000, 2));
    }
    if (rank == 0) others_are_done = true;
    CHECK_EQUAL(pending.wait().message, "");
    CHECK(waiting == Floats(10, 3));
  });
}

TEST(process_sets_can_be_removed_and_wrong_ones_are_refused) {
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    const auto id = add_process_set(engine, {0, 1});
    Floats data(4, 1);
    CHECK_EQUAL(sum(engine, "x", data, id).message, "");
    Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
    CHECK_EQUAL(run(engine, remove.numbers({id})).message, "");
    Status status;
    Request gone(SPARKHVD_BARRIER, "gone");
    engine.submit(gone.on(id).raw(), &status);
    CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    CHECK(status.message.find("does not exist") != std::string::npos);
    // Ranks that disagree on the ranks of a set get an error, and continue.
    Request different(SPARKHVD_ADD_PROCESS_SET, "different");
    const Status refused = run(engine, different.numbers(rank == 0 ? Ranks{0} : Ranks{1}));
    CHECK_EQUAL(refused.code, SPARKHVD_MISMATCH);
    CHECK_MESSAGE(refused.message.find("[0]") != std::string::npos, refused.message);
    for (const Ranks& wrong : {Ranks{}, Ranks{2}, Ranks{1, 0}, Ranks{0, 0}, Ranks{-1}}) {
      Request request(SPARKHVD_ADD_PROCESS_SET, "wrong");
      engine.submit(request.numbers(wrong).raw(), &status);
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    }
    Request never(SPARKHVD_REMOVE_PROCESS_SET, "never");
    const Status unknown = run(engine, never.numbers({id + 1}));
    CHECK_EQUAL(unknown.code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_MESSAGE(unknown.message.find("was never added") != std::string::npos, unknown.message);
    CHECK(add_process_set(engine, {1}) > id);
  });
}

// Frames between the ranks of a host use shared memory if they are small and there is room, else the connections.
TEST(orders_that_take_different_ways_keep_their_order) {
  constexpr std::int64_t kManyTensors = 300;  // their rows do not fit into a frame in shared memory
  constexpr int kOperations = 400;
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    std::vector<int> order(kOperations);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(static_cast<unsigned>(rank));
    std::ranges::shuffle(order, random);
    std::vector<float> own(static_cast<std::size_t>(rank + 1), static_cast<float>(rank));
    std::vector<Floats> data(kOperations);
    std::vector<std::pair<int, TestWork>> works;
    for (const int i : order) {
      const std::string name = "operation " + std::to_string(i);
      if (i % 7 == 0) {
        Request request(SPARKHVD_ALLGATHER, name);
        for (std::int64_t t = 0; t < kManyTensors; ++t) {
          request.tensor(own.data(), nullptr, {rank + 1});
        }
        works.emplace_back(i, engine.submit(request.raw()));
      } else {
        auto& values = data[static_cast<std::size_t>(i)];
        values.assign(5, static_cast<float>(rank + i));
        Request request(SPARKHVD_ALLREDUCE, name);
        request.tensor(values.data(), values.data(), {5});
        works.emplace_back(i, engine.submit(request.raw()));
      }
    }
    for (auto& [i, work] : works) {
      CHECK_EQUAL(work.wait().message, "");
      if (i % 7 == 0) {
        CHECK_EQUAL(result_of(work).rows.size(), std::size_t{3 * kManyTensors});
      } else {
        CHECK_EQUAL(data[static_cast<std::size_t>(i)][4], static_cast<float>(3 + 3 * i));
      }
    }
  });
}

TEST(a_joined_rank_adds_nothing_and_its_memory_stays_out_of_it) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::size_t> counts{1, 700, 5000, 70001};
  for (const auto& hosts : kLayouts) {
    const auto size = static_cast<std::int32_t>(hosts.size());
    for (std::int32_t departing = 0; departing < size; ++departing) {
      run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
        for (std::size_t done = 0; done <= counts.size(); ++done) {
          // In operations without the departing rank its memory has NaN, which must not reach a result.
          const std::size_t mine = rank == departing ? done : counts.size();
          std::vector<Floats> data;
          for (std::size_t i = 0; i < counts.size(); ++i) {
            data.emplace_back(counts[i], i < mine ? static_cast<float>(rank + 1) : nan);
          }
          std::vector<TestWork> works;
          for (std::size_t i = 0; i < mine; ++i) {
            Request request(SPARKHVD_ALLREDUCE, "bucket " + std::to_string(i));
            request.tensor(data[i].data(), data[i].data(), {static_cast<std::int64_t>(counts[i])});
            works.push_back(engine.submit(request.raw()));
          }
          if (rank != departing) {
            for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
          }
          Request join(SPARKHVD_JOIN, "join");
          TestWork joined = engine.submit(join.raw());
          CHECK_EQUAL(joined.wait().message, "");
          for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
          const auto last = result_of(joined).rows.at(0);
          CHECK(last >= 0 && last < size);
          float all = 0;
          for (std::int32_t r = 0; r < size; ++r) all += static_cast<float>(r + 1);
          for (std::size_t i = 0; i < mine; ++i) {
            const float expected = i < done ? all : all - static_cast<float>(departing + 1);
            CHECK_MESSAGE(data[i] == Floats(counts[i], expected),
                          "bucket " + std::to_string(i) + " after " + std::to_string(done) +
                              ", rank " + std::to_string(departing) + " joined");
          }
          for (std::size_t i = mine; i < counts.size(); ++i) CHECK(data[i][0] != data[i][0]);
        }
      });
    }
  }
}

TEST(with_a_joined_rank_average_divides_by_all_and_the_rest_is_refused) {
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    if (rank != 2) {
      Floats data(10, 5);
      CHECK_EQUAL(sum(engine, "average", data, 0, SPARKHVD_AVERAGE).message, "");
      CHECK(data == Floats(10, 10.0F / 3.0F));
      CHECK_EQUAL(sum(engine, "max", data, 0, SPARKHVD_MAX).code, SPARKHVD_MISMATCH);
      Request barrier(SPARKHVD_BARRIER, "barrier");
      const Status refused = run(engine, barrier);
      CHECK_EQUAL(refused.code, SPARKHVD_MISMATCH);
      CHECK_MESSAGE(refused.message.find("rank 2 has joined") != std::string::npos,
                    refused.message);
    }
    Request join(SPARKHVD_JOIN, "join");
    CHECK_EQUAL(run(engine, join).message, "");
    Floats data(10, 1);
    CHECK_EQUAL(sum(engine, "max", data, 0, SPARKHVD_MAX).message, "");
  });
}

TEST(a_join_lasts_as_long_as_the_others_work) {
  WorldOptions options = world(one_host(2));
  options.stall_shutdown_s = 1;
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    if (rank == 0) {
      for (int i = 0; i < 40; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        Floats data(10, 1);
        CHECK_EQUAL(sum(engine, "x", data).message, "");
        CHECK(data == Floats(10, 1));
      }
    }
    Request join(SPARKHVD_JOIN, "join");
    CHECK_EQUAL(run(engine, join).message, "");
  });
}

TEST(registered_memory_is_reduced_in_place) {
  for (const auto& hosts : kLayouts) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      constexpr std::size_t kCount = 300000;
      Buffer buffer(engine, kCount * sizeof(float));
      float* data = buffer.data();
      CHECK_EQUAL(data[kCount - 1], 0.0F);
      for (const std::size_t count : {std::size_t{1}, std::size_t{999}, kCount}) {
        const std::size_t begin = (kCount - count) / 2;
        for (std::size_t i = 0; i < kCount; ++i) data[i] = static_cast<float>(rank);
        for (int round = 0; round < 3; ++round) {
          Request request(SPARKHVD_ALLREDUCE, "x");
          request.tensor(data + begin, data + begin, {static_cast<std::int64_t>(count)});
          CHECK_EQUAL(run(engine, request).message, "");
        }
        for (std::size_t i = 0; i < kCount; ++i) {
          const bool inside = i >= begin && i < begin + count;
          CHECK_EQUAL(data[i], inside ? 6.0F * 4 * 4 : static_cast<float>(rank));
        }
      }
    });
  }
}

TEST(registered_memory_at_different_places_and_beside_private_memory) {
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    constexpr std::size_t kCount = 20000;
    Buffer buffer(engine, 3 * kCount * sizeof(float));
    CHECK(buffer.is_shared());
    // Each rank's tensor has a different offset.
    float* data = buffer.data() + static_cast<std::size_t>(rank) * kCount;
    std::fill_n(data, kCount, 1.0F);
    Request request(SPARKHVD_ALLREDUCE, "offsets");
    request.tensor(data, data, {kCount});
    CHECK_EQUAL(run(engine, request).message, "");
    for (std::size_t i = 0; i < kCount; ++i) CHECK_EQUAL(data[i], 3.0F);
    // If a rank's tensor is not in registered memory, all ranks use the private path.
    Floats own(kCount, 3);
    float* mixed = rank == 1 ? own.data() : data;
    Request other(SPARKHVD_ALLREDUCE, "mixed");
    other.tensor(mixed, mixed, {kCount});
    CHECK_EQUAL(run(engine, other).message, "");
    for (std::size_t i = 0; i < kCount; ++i) CHECK_EQUAL(mixed[i], 9.0F);
  });
}

TEST(registered_memory_with_a_joined_rank) {
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    constexpr std::size_t kCount = 100000;
    Buffer buffer(engine, kCount * sizeof(float));
    std::fill_n(buffer.data(), kCount, static_cast<float>(rank + 1));
    if (rank != 1) {
      Request request(SPARKHVD_ALLREDUCE, "x");
      request.tensor(buffer.data(), buffer.data(), {kCount});
      CHECK_EQUAL(run(engine, request).message, "");
    }
    Request join(SPARKHVD_JOIN, "join");
    CHECK_EQUAL(run(engine, join).message, "");
    for (std::size_t i = 0; i < kCount; ++i) {
      CHECK_EQUAL(buffer.data()[i], rank == 1 ? 2.0F : 4.0F);
    }
  });
}

TEST(registered_memory_outlives_its_engine) {
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t) {
    Buffer buffer(engine, 4096);
    buffer.data()[7] = 5;
    engine.destroy();
    CHECK_EQUAL(buffer.data()[7], 5.0F);
    buffer.data()[8] = 6;
  });
}

TEST(a_busy_rank_keeps_nobody_waiting_for_small_tensors_or_registered_ones) {
  // Rank 1 submits and then does not drive for a while. The other ranks finish long before it returns.
  std::atomic<int> done{0};
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    Buffer buffer(engine, 1 << 20);
    Floats small(100, 1);
    std::vector<TestWork> works;
    Request first(SPARKHVD_ALLREDUCE, "small");
    works.push_back(engine.submit(first.tensor(small.data(), small.data(), {100}).raw()));
    Request second(SPARKHVD_ALLREDUCE, "registered");
    works.push_back(engine.submit(second.tensor(buffer.data(), buffer.data(), {1 << 18}).raw()));
    if (rank == 1) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (done < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      CHECK_EQUAL(done.load(), 2);
    }
    for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
    ++done;
  });
}

TEST(several_streams_and_new_settings_keep_every_byte) {
  WorldOptions options = world({0, 1, 1, 2});
  options.use_tcp = true;
  options.streams = 3;
  options.slot_bytes = 64 << 10;
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    for (const Ranks& knobs :
         {Ranks{0, 0, 0}, Ranks{0, 1, 0}, Ranks{16384, 2, 1}, Ranks{4096, 3, 16}}) {
      Request configure(SPARKHVD_CONFIGURE, "configure");
      CHECK_EQUAL(run(engine, configure.numbers(knobs)).message, "");
      for (const std::size_t count : {std::size_t{7}, std::size_t{50000}, std::size_t{700001}}) {
        Floats data(count);
        for (std::size_t i = 0; i < count; ++i) {
          data[i] = static_cast<float>((i + static_cast<std::size_t>(rank)) % 97);
        }
        CHECK_EQUAL(sum(engine, "x", data).message, "");
        for (std::size_t i = 0; i < count; ++i) {
          CHECK_EQUAL(data[i],
                      static_cast<float>(i % 97 + (i + 1) % 97 + (i + 2) % 97 + (i + 3) % 97));
        }
      }
    }
    Status status;
    Request wrong(SPARKHVD_CONFIGURE, "wrong");
    engine.submit(wrong.numbers({0, 4, 0}).raw(), &status);
    CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_MESSAGE(status.message.find("from 1 to 3") != std::string::npos, status.message);
  });
}

}  // namespace sparkhvd::test::process_set_test
