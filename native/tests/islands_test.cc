// Cost of many islands: the bytes that ranks send for tensors and for negotiation. The tests also check that the
// algorithms that save bytes give right results.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <numeric>

#include "engine/orders.h"
#include "error.h"
#include "world.h"

namespace sparkhvd::test::islands_test {
namespace {

using Hosts = std::vector<std::int32_t>;
using Floats = std::vector<float>;

Hosts alone(int size) {
  Hosts hosts(static_cast<std::size_t>(size));
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

/// A layout with hosts of four ranks.
Hosts fours(int size) {
  Hosts hosts = alone(size);
  for (auto& host : hosts) host /= 4;
  return hosts;
}

/// Bytes that this rank has sent on connections.
std::uint64_t sent_bytes(TestEngine& engine) {
  std::string text(sparkhvd_engine_counters(engine.get(), nullptr, 0) + 64, '\0');
  sparkhvd_engine_counters(engine.get(), text.data(), text.size());
  const std::string key = "\"sent_bytes\":";
  const auto begin = text.find(key);
  if (begin == std::string::npos) throw Failure("no sent_bytes in " + text);
  return std::stoull(text.substr(begin + key.size()));
}

/// Pseudorandom numbers that are fast to compute, so that two positions rarely have equal numbers.
Floats mixed(unsigned seed, std::size_t count) {
  Floats numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<float>(((static_cast<unsigned>(i) + seed) * 2654435761U) >> 8);
  }
  return numbers;
}

Status broadcast(TestEngine& engine, std::int32_t root, const Floats& input, Floats& output,
                 std::int32_t process_set = 0) {
  Request request(SPARKHVD_BROADCAST, "from " + std::to_string(root));
  request.tensor(input.data(), output.data(), {static_cast<std::int64_t>(input.size())});
  request.on(process_set).raw().root_rank = root;
  return engine.submit(request.raw()).wait();
}

/// Checks broadcasts from every root, with sizes on both sides of every limit.
void check_broadcasts(TestEngine& engine, std::int32_t rank, const Hosts& roots,
                      std::int32_t process_set = 0) {
  for (const std::int32_t root : roots) {
    for (const std::size_t count : {0U, 1U, 1000U, 16384U, 16385U, 70003U, 300007U}) {
      const auto seed = static_cast<unsigned>(root) * 1000 + static_cast<unsigned>(count);
      const Floats expected = mixed(seed, count);
      Floats own = rank == root ? expected : Floats(count, -1);
      Floats other(count, -2);
      const bool in_place = (static_cast<std::size_t>(root) + count) % 2 == 0;
      Floats& output = in_place ? own : other;
      CHECK_EQUAL(broadcast(engine, root, own, output, process_set).message, "");
      CHECK_MESSAGE(output == expected, std::to_string(count) + " from " + std::to_string(root));
    }
  }
}

}  // namespace

TEST(broadcast_over_islands_of_any_size_delivers_every_byte_from_every_root) {
  for (const auto& hosts : std::vector<Hosts>{{0, 0, 1},
                                              {0, 1, 2},
                                              {0, 1, 0, 1, 1, 2},
                                              {0, 0, 0, 1, 2, 2},
                                              {0, 0, 1, 2, 2, 2, 2, 3},
                                              alone(5)}) {
    WorldOptions options;
    options.hosts = hosts;
    options.streams = hosts.size() == 6 ? 2 : 1;
    options.slots = hosts.size() > 5 ? 2 : 3;
    options.slot_bytes = 32 << 10;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      check_broadcasts(engine, rank, alone(static_cast<int>(hosts.size())));
    });
  }
}

TEST(broadcast_on_a_process_set_of_parts_of_islands) {
  WorldOptions options;
  options.hosts = {0, 0, 0, 1, 1, 2, 3, 3};
  const Hosts members{1, 2, 3, 5, 7};
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    Request add(SPARKHVD_ADD_PROCESS_SET, "add");
    add.numbers({members.begin(), members.end()});
    TestWork work = engine.submit(add.raw());
    CHECK_EQUAL(work.wait().message, "");
    const auto set = static_cast<std::int32_t>(result_of(work).rows.at(0));
    // A broadcast on all ranks at the same time: the islands of a process set do not affect another set.
    Floats all(100003, static_cast<float>(rank));
    Request request(SPARKHVD_BROADCAST, "all");
    request.tensor(all.data(), all.data(), {100003});
    request.raw().root_rank = 4;
    TestWork other = engine.submit(request.raw());
    if (std::ranges::count(members, rank) > 0) check_broadcasts(engine, rank, members, set);
    CHECK_EQUAL(other.wait().message, "");
    CHECK(all == Floats(100003, 4));
  });
}

TEST(the_root_of_a_broadcast_sends_the_tensor_once) {
  for (const auto& hosts : {alone(2), alone(4), alone(8), alone(16), fours(16)}) {
    WorldOptions options;
    options.hosts = hosts;
    const auto size = static_cast<std::ptrdiff_t>(hosts.size());
    std::barrier meet(size);
    constexpr std::int32_t kRoot = 1;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const auto bytes_of = [&](std::size_t count) {
        const Floats expected = mixed(7, count);
        Floats data = rank == kRoot ? expected : Floats(count);
        meet.arrive_and_wait();
        const std::uint64_t before = sent_bytes(engine);
        CHECK_EQUAL(broadcast(engine, kRoot, data, data).message, "");
        CHECK(data == expected);
        return static_cast<double>(sent_bytes(engine) - before) / static_cast<double>(4 * count);
      };
      const double large = bytes_of(1 << 20);
      const double small = bytes_of(4 << 10);
      if (rank == kRoot) {
        CHECK_MESSAGE(large < 1.05, std::to_string(large));
        const int islands = hosts.back() + 1;
        CHECK_MESSAGE(small < std::log2(islands) + 0.1, std::to_string(small));
      } else {
        CHECK_MESSAGE(large < 1.05, std::to_string(large));
      }
    });
  }
}

TEST(an_order_tells_each_island_its_own_places) {
  std::vector<std::vector<Rank>> islands;
  Execute order{0, 5, "x", {}};
  for (std::int32_t rank = 0; rank < 64; ++rank) {
    if (rank % 4 == 0) islands.emplace_back();
    islands.back().push_back(Rank{rank});
    order.places.push_back({{0, 3}, static_cast<std::uint64_t>(rank)});
  }
  const Team team(Rank{0}, islands);
  auto parts = parts_of(order, team);
  CHECK_EQUAL(parts.size(), 16U);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].to == islands[i]);
    CHECK_EQUAL(parts[i].order.sequence, 5U);
    CHECK_EQUAL(parts[i].order.places.size(), 4U);
    CHECK_EQUAL(parts[i].order.places[1].offset, 4 * i + 1);
    CHECK(encode(parts[i].order).size() < 200);
  }
  // Some ranks have joined: rank 1 of the first island, and all ranks of the second island.
  order.contributors = {Rank{0}, Rank{2}, Rank{3}, Rank{63}};
  order.places = {{{0, 3}, 0}, {{0, 3}, 2}, {{0, 3}, 3}, {{0, 3}, 63}};
  parts = parts_of(order, team);
  CHECK_EQUAL(parts[0].order.places.size(), 3U);
  CHECK_EQUAL(parts[1].order.places.size(), 0U);
  CHECK_EQUAL(parts[15].order.places.at(0).offset, 63U);
  for (const auto& part : parts) CHECK(part.order.contributors == order.contributors);
  // If all ranks share memory, all of them read the same message.
  CHECK_EQUAL(parts_of(Execute{0, 0, "x", {}}, team).size(), 1U);
  const Team one(Rank{0}, {{Rank{0}, Rank{1}}});
  order.contributors.clear();
  order.places.resize(2);
  CHECK_EQUAL(parts_of(order, one).at(0).order.places.size(), 2U);
}

TEST(an_order_of_alltoall_tells_each_rank_what_concerns_it) {
  Execute order{0, 0, "x", {}};
  order.splits = {1, 2, 3, 4, 5, 6, 7, 8, 9};  // [from][to]
  const Team team(Rank{0}, {{Rank{0}, Rank{2}}, {Rank{1}}});
  const auto parts = parts_of(order, team);
  CHECK_EQUAL(parts.size(), 3U);
  using Numbers = std::vector<std::int64_t>;
  // Each order has the rows from every rank, then this rank's begin in the streams of its island, then the longest
  // stream.
  CHECK(parts[0].order.rows == (Numbers{1, 4, 7, 0, 0, 7}));
  CHECK(parts[1].order.rows == (Numbers{2, 5, 8, 0, 0}));
  CHECK(parts[2].order.rows == (Numbers{3, 6, 9, 0, 0, 7}));
  const Team all(Rank{0}, {{Rank{0}, Rank{1}, Rank{2}}});
  CHECK(alltoall_rows(order, all, Rank{2}) == (Numbers{3, 6, 9, 2, 4, 0, 15}));
  order.is_on_device = true;
  CHECK(alltoall_rows(order, all, Rank{2}) == (Numbers{3, 6, 9, 9}));
  order.splits[4] = -1;
  CHECK_THROWS(Error, alltoall_rows(order, all, Rank{0}));
  order.splits.pop_back();
  CHECK_THROWS(Error, alltoall_rows(order, all, Rank{0}));
}

TEST(stepped_exchanges_add_up_on_every_layout) {
  const std::vector<Hosts> layouts = {alone(2),        alone(3),           alone(5),
                                      alone(8),        {0, 0, 1, 1},       {0, 0, 1, 1, 2},
                                      {0, 1, 0, 2, 1}, {0, 0, 0, 1, 2, 2}, {0, 0, 1, 1, 2, 2, 3}};
  for (const auto& hosts : layouts) {
    WorldOptions options;
    options.hosts = hosts;
    const auto ranks = static_cast<unsigned>(hosts.size());
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      Request configure(SPARKHVD_CONFIGURE, "never directly");
      std::vector<std::int64_t> knobs(SPARKHVD_NUM_KNOBS);
      knobs[SPARKHVD_KNOB_DIRECT_RANKS] = 1;
      CHECK_EQUAL(engine.submit(configure.numbers(knobs).raw()).wait().message, "");
      for (const std::size_t count : {1, 7, 64, 1001, 40009, 150001, 500009}) {
        // The sum is less than 2^24, so that every order of addition is exact.
        const auto addend = [&](unsigned of_rank, std::size_t i) {
          return static_cast<float>((i * 31 + of_rank * 7) % 1009);
        };
        Floats data(count);
        for (std::size_t i = 0; i < count; ++i) data[i] = addend(static_cast<unsigned>(rank), i);
        Request request(SPARKHVD_ALLREDUCE, "x");
        request.tensor(data.data(), data.data(), {static_cast<std::int64_t>(count)});
        CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
        for (std::size_t i = 0; i < count; ++i) {
          float sum = 0;
          for (unsigned from = 0; from < ranks; ++from) sum += addend(from, i);
          CHECK_EQUAL(data[i], sum);
        }
      }
    });
  }
}

TEST(registered_memory_while_all_ranks_of_an_island_have_joined) {
  WorldOptions options;
  options.hosts = {0, 0, 1, 1, 2};
  run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
    constexpr std::int64_t kCount = 20011;
    Request add(SPARKHVD_REGISTER, "register");
    TestWork registration = engine.submit(add.numbers({kCount * 4}).raw());
    CHECK_EQUAL(registration.wait().message, "");
    sparkhvd_buffer* buffer = nullptr;
    CHECK_EQUAL(sparkhvd_work_buffer(registration.get(), &buffer, nullptr, 0), SPARKHVD_OK);
    auto* shared = static_cast<float*>(sparkhvd_buffer_data(buffer));
    const auto check_sum = [&](float* data, float expected) {
      std::fill_n(data, kCount, static_cast<float>(rank));
      Request request(SPARKHVD_ALLREDUCE, "x");
      CHECK_EQUAL(engine.submit(request.tensor(data, data, {kCount}).raw()).wait().message, "");
      CHECK_EQUAL(std::count(data, data + kCount, expected), kCount);
    };
    Floats own(kCount);
    check_sum(shared, 10);
    for (int round = 0; round < 3 && rank / 2 != 1; ++round) {
      check_sum(round == 1 ? own.data() : shared, 5);
    }
    Request join(SPARKHVD_JOIN, "join");
    CHECK_EQUAL(engine.submit(join.raw()).wait().message, "");
    check_sum(own.data(), 10);
    check_sum(shared, 10);
    sparkhvd_buffer_release(buffer);
  });
}

TEST(control_bytes_of_rank_0_grow_with_what_ranks_must_know) {
  for (const int size : {16, 32, 64}) {
    WorldOptions options;
    options.hosts = fours(size);
    options.spin_us = 0;
    std::barrier meet(size);
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const auto bytes_of = [&](Request& request) {
        meet.arrive_and_wait();
        const std::uint64_t before = sent_bytes(engine);
        CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
        meet.arrive_and_wait();
        return sent_bytes(engine) - before;
      };
      Request add(SPARKHVD_REGISTER, "register");
      TestWork registration = engine.submit(add.numbers({4}).raw());
      CHECK_EQUAL(registration.wait().message, "");
      sparkhvd_buffer* buffer = nullptr;
      CHECK_EQUAL(sparkhvd_work_buffer(registration.get(), &buffer, nullptr, 0), SPARKHVD_OK);
      auto* number = static_cast<float*>(sparkhvd_buffer_data(buffer));
      *number = 1;
      Request reduce(SPARKHVD_ALLREDUCE, "x");
      const std::uint64_t reduced = bytes_of(reduce.tensor(number, number, {1}));
      CHECK_EQUAL(*number, static_cast<float>(size));
      sparkhvd_buffer_release(buffer);
      // Without tensor bytes, all sent bytes belong to the negotiation.
      Request empty(SPARKHVD_ALLTOALL, "empty");
      empty.tensor(nullptr, nullptr, {0, 3});
      const std::uint64_t exchanged =
          bytes_of(empty.numbers(std::vector<std::int64_t>(static_cast<std::size_t>(size))));
      if (rank != 0) return;
      const auto ranks = static_cast<std::uint64_t>(size);
      CHECK_MESSAGE(reduced < 250 * ranks, std::to_string(reduced));
      CHECK_MESSAGE(exchanged < ranks * (2 * ranks * 8 + 100), std::to_string(exchanged));
    });
  }
}

}  // namespace sparkhvd::test::islands_test
