// Messages from rank to rank: sizes, orders, tags and ends of all kinds, through the C interface with ranks as threads.
// The matching of receives and messages is compared with a model.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <random>
#include <span>

#include "point_to_point/matching.h"
#include "relay.h"
#include "world.h"

namespace sparkhvd::test::point_to_point_test {
namespace {

using Floats = std::vector<float>;
constexpr std::int32_t kAny = -1;

WorldOptions world(std::vector<std::int32_t> hosts) {
  WorldOptions options;
  options.hosts = std::move(hosts);
  options.use_tcp = true;
  return options;
}

std::vector<WorldOptions> worlds() {
  std::vector<WorldOptions> all;
  for (const auto& hosts :
       {one_host(1), one_host(2), one_host(3), std::vector<std::int32_t>{0, 1},
        std::vector<std::int32_t>{0, 1, 2}, std::vector<std::int32_t>{0, 0, 1, 1}}) {
    all.push_back(world(hosts));
  }
  all.push_back(world(one_host(2)));
  all.back().use_shared_memory = false;
  all.push_back(world({0, 1, 1}));
  all.back().streams = 3;
  return all;
}

/// A unique name for an operation. Names of messages need only be unique on their rank.
std::string next_name() {
  static std::atomic<int> number{0};
  return "message " + std::to_string(number++);
}

TestWork send(TestEngine& engine, std::int32_t to, std::int64_t tag, const Floats& data,
              double timeout_s = -1) {
  Request request(SPARKHVD_SEND, next_name());
  request.tensor(data.data(), nullptr, {static_cast<std::int64_t>(data.size())}).numbers({tag});
  request.raw().root_rank = to;
  request.raw().timeout_s = timeout_s;
  return engine.submit(request.raw());
}

TestWork receive(TestEngine& engine, std::int32_t from, std::int64_t tag, Floats& data,
                 double timeout_s = -1, bool takes_shorter = false) {
  Request request(SPARKHVD_RECEIVE, next_name());
  request.tensor(nullptr, data.data(), {static_cast<std::int64_t>(data.size())});
  request.numbers(takes_shorter ? std::vector<std::int64_t>{tag, 1}
                                : std::vector<std::int64_t>{tag});
  request.raw().root_rank = from;
  request.raw().timeout_s = timeout_s;
  return engine.submit(request.raw());
}

Floats numbers(std::size_t count, std::int32_t seed) {
  Floats data(count);
  for (std::size_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>((i * 31 + static_cast<std::size_t>(seed) * 7) % 8191);
  }
  return data;
}

void check(TestWork& work) {
  const Status status = work.wait();
  CHECK_EQUAL(status.message, "");
  CHECK_EQUAL(status.code, SPARKHVD_OK);
}

void check_says(const Status& status, std::int32_t code, const std::string& text) {
  CHECK_MESSAGE(status.code == code && status.message.find(text) != std::string::npos,
                std::to_string(status.code) + " " + status.message);
}

}  // namespace

TEST(messages_of_every_size_go_around_in_both_orders) {
  for (const auto& options : worlds()) {
    const auto size = static_cast<std::int32_t>(options.hosts.size());
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const std::int32_t next = (rank + 1) % size;
      const std::int32_t previous = (rank + size - 1) % size;
      for (const std::size_t count : {0, 1, 1000, 4000, 5000, 20000, 70001, 1000003}) {
        for (const bool receives_first : {false, true}) {
          const Floats sent = numbers(count, rank);
          Floats received(count, -1);
          std::vector<TestWork> works;
          if (receives_first) works.push_back(receive(engine, previous, 5, received));
          works.push_back(send(engine, next, 5, sent));
          if (!receives_first) works.push_back(receive(engine, previous, 5, received));
          for (auto& work : works) check(work);
          CHECK(received == numbers(count, previous));
          const auto rows = result_of(works[receives_first ? 0 : 1]).rows;
          CHECK(rows == (std::vector<std::int64_t>{
                            previous, 5, static_cast<std::int64_t>(count * sizeof(float))}));
        }
      }
    });
  }
}

TEST(messages_are_matched_by_tag_and_sender_in_their_order) {
  for (const auto& options : worlds()) {
    const auto size = static_cast<std::int32_t>(options.hosts.size());
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      // Each rank sends three messages of each tag to every rank, with different sizes. The receives are in another
      // order.
      const std::vector<std::size_t> counts{3, 30000, 700};
      std::vector<Floats> memory;
      std::vector<TestWork> works;
      memory.reserve(100);
      for (std::int32_t to = 0; to < size; ++to) {
        for (int i = 0; i < 9; ++i) {
          const auto count = counts[static_cast<std::size_t>(i / 3)];
          memory.push_back(numbers(count, rank * 100 + i));
          works.push_back(send(engine, to, i % 3, memory.back()));
        }
      }
      std::vector<Floats> received;
      received.reserve(100);
      std::vector<std::pair<std::int32_t, int>> expected;
      for (const int tag : {2, 0, 1}) {
        for (std::int32_t from = size - 1; from >= 0; --from) {
          for (int i = tag; i < 9; i += 3) {
            received.emplace_back(counts[static_cast<std::size_t>(i / 3)]);
            expected.emplace_back(from, i);
            works.push_back(receive(engine, from, tag, received.back()));
          }
        }
      }
      for (auto& work : works) check(work);
      for (std::size_t i = 0; i < received.size(); ++i) {
        const auto [from, number] = expected[i];
        CHECK(received[i] == numbers(received[i].size(), from * 100 + number));
      }
    });
  }
}

TEST(messages_from_any_rank_say_whose_they_are) {
  for (const auto& options : worlds()) {
    const auto size = static_cast<std::int32_t>(options.hosts.size());
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      for (const std::size_t count : {std::size_t{2}, std::size_t{50000}}) {
        const Floats own = numbers(count, rank);
        TestWork sent = send(engine, 0, 9, own);
        if (rank == 0) {
          std::vector<std::int64_t> senders;
          for (std::int32_t i = 0; i < size; ++i) {
            Floats data(count);
            TestWork work = receive(engine, kAny, 9, data);
            check(work);
            senders.push_back(result_of(work).rows.at(0));
            CHECK(data == numbers(count, static_cast<std::int32_t>(senders.back())));
          }
          std::ranges::sort(senders);
          for (std::int32_t i = 0; i < size; ++i) {
            CHECK_EQUAL(senders[static_cast<std::size_t>(i)], std::int64_t{i});
          }
        }
        check(sent);
        // A receive of this round must not get a message of the next round.
        Request barrier(SPARKHVD_BARRIER, "barrier");
        CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
      }
    });
  }
}

TEST(large_messages_both_ways_and_collectives_in_any_order_keep_nobody_waiting) {
  for (const auto& options : worlds()) {
    const auto size = static_cast<std::int32_t>(options.hosts.size());
    if (size < 2) continue;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      constexpr std::size_t kCount = 400000;
      for (int round = 0; round < 3; ++round) {
        std::vector<Floats> memory;
        memory.reserve(20);
        std::vector<TestWork> works;
        Floats sum(kCount, 1);
        const auto reduce = [&] {
          Request request(SPARKHVD_ALLREDUCE, "sum");
          request.tensor(sum.data(), sum.data(), {kCount});
          works.push_back(engine.submit(request.raw()));
        };
        // Some ranks submit the collective before the messages, some after them, some between them.
        if (rank % 3 == 0) reduce();
        for (std::int32_t other = 0; other < size; ++other) {
          if (other == rank) continue;
          memory.push_back(numbers(kCount, rank));
          works.push_back(send(engine, other, round, memory.back()));
        }
        if (rank % 3 == 1) reduce();
        std::vector<Floats> received(static_cast<std::size_t>(size), Floats(kCount));
        for (std::int32_t other = 0; other < size; ++other) {
          if (other == rank) continue;
          works.push_back(receive(engine, other, round, received[static_cast<std::size_t>(other)]));
        }
        if (rank % 3 == 2) reduce();
        for (auto& work : works) check(work);
        CHECK(sum == Floats(kCount, static_cast<float>(size)));
        for (std::int32_t other = 0; other < size; ++other) {
          if (other == rank) continue;
          CHECK(received[static_cast<std::size_t>(other)] == numbers(kCount, other));
        }
      }
    });
  }
}

TEST(many_small_messages_that_nobody_asks_for_wait_at_their_sender) {
  for (const auto& options : {world(one_host(2)), world({0, 1})}) {
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      constexpr int kMessages = 400;  // of 12 KB: far more than the receiver keeps
      std::vector<Floats> memory;
      memory.reserve(kMessages);
      std::vector<TestWork> works;
      if (rank == 0) {
        for (int i = 0; i < kMessages; ++i) {
          memory.push_back(numbers(3000, i));
          works.push_back(send(engine, 1, 1, memory.back()));
        }
        CHECK_EQUAL(works.front().wait().code, SPARKHVD_OK);
        CHECK_EQUAL(works.back().wait(100).code, SPARKHVD_PENDING);
      }
      Request barrier(SPARKHVD_BARRIER, "barrier");
      CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
      for (int i = 0; i < kMessages && rank == 1; ++i) {
        Floats data(3000);
        TestWork work = receive(engine, 0, 1, data);
        check(work);
        CHECK(data == numbers(3000, i));
      }
      for (auto& work : works) check(work);
    });
  }
}

TEST(messages_that_do_not_fit_are_told_to_both_and_later_ones_come) {
  for (const auto& options : worlds()) {
    if (options.hosts.size() < 2) continue;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      for (const std::size_t count : {std::size_t{10}, std::size_t{100000}}) {
        const Floats sent = numbers(count, 1);
        Floats data(count - 1);
        const std::string text = "rank 0 sent " + std::to_string(count) +
                                 " elements of float32 with tag 4, rank 1 receives " +
                                 std::to_string(count - 1) + " elements of float32";
        if (rank == 0) {
          TestWork work = send(engine, 1, 4, sent);
          const Status status = work.wait();
          // A small message has already been sent when the receiver finds the mismatch, so its send succeeds.
          if (count > 10) check_says(status, SPARKHVD_MISMATCH, text);
          TestWork next = send(engine, 1, 4, sent);
          check(next);
        } else if (rank == 1) {
          TestWork work = receive(engine, 0, 4, data);
          check_says(work.wait(), SPARKHVD_MISMATCH, text);
          Floats whole(count);
          TestWork next = receive(engine, 0, 4, whole);
          check(next);
          CHECK(whole == sent);
        }
      }
    });
  }
}

TEST(messages_that_nobody_meets_time_out_alone) {
  for (const auto& options : worlds()) {
    if (options.hosts.size() < 2) continue;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const Floats sent = numbers(100000, 1);
      Floats data(100000);
      if (rank == 0) {
        TestWork work = send(engine, 1, 4, sent, 0.2);
        check_says(work.wait(), SPARKHVD_TIMEOUT,
                   "rank 1 did not receive a message with tag 4 within 0.2 s");
      } else if (rank == 1) {
        TestWork work = receive(engine, 0, 7, data, 0.2);
        check_says(work.wait(), SPARKHVD_TIMEOUT, "rank 0 sent nothing with tag 7 within 0.2 s");
      }
      Request barrier(SPARKHVD_BARRIER, "barrier");
      CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
      // The receive must get this message and not the withdrawn message.
      if (rank == 0) {
        const Floats next = numbers(100000, 2);
        TestWork work = send(engine, 1, 4, next);
        check(work);
      } else if (rank == 1) {
        TestWork work = receive(engine, 0, 4, data);
        check(work);
        CHECK(data == numbers(100000, 2));
      }
    });
  }
}

// Large enough that the messages are announced and not sent at once.
constexpr std::size_t kWithdrawnCount = 300000;

/// Runs two ranks on two hosts; `control` relays their control frames. A message of rank 0 is withdrawn after rank 1
/// has received its announcement. `between` runs on rank 0 before it waits for the withdrawal, `rank_0` after it.
/// `rank_1` runs on rank 1, perhaps before the withdrawal arrives.
void after_a_withdrawal(Relay& control, const std::function<void(TestEngine&)>& between,
                        const std::function<void(TestEngine&)>& rank_0,
                        const std::function<void(TestEngine&)>& rank_1, Relay* tensors = nullptr) {
  run_ranks(
      world({0, 1}),
      [&](TestEngine& engine, std::int32_t rank) {
        if (rank == 0) {
          const Floats data = numbers(kWithdrawnCount, 0);
          TestWork withdrawn = send(engine, 1, 4, data, 0.3);
          TestWork announced = send(engine, 1, 5, Floats{1});
          between(engine);
          check_says(withdrawn.wait(), SPARKHVD_TIMEOUT, "did not receive a message with tag 4");
          rank_0(engine);
        } else {
          Floats one(1);
          TestWork announced = receive(engine, 0, 5, one);
          check(announced);
          rank_1(engine);
        }
      },
      [&](auto& sockets) {
        control.join(sockets[0][1], sockets[1][0]);
        if (tensors != nullptr) tensors->join(sockets[0][3], sockets[1][2]);
      });
}

TEST(a_receive_does_not_take_what_fills_the_place_of_a_withdrawn_message) {
  Relay control;
  std::barrier meet(2);
  after_a_withdrawal(
      control,
      [&](TestEngine&) {
        meet.arrive_and_wait();  // the message was announced
        control.let_pass(0, 0);
      },
      [&](TestEngine& engine) {
        meet.arrive_and_wait();
        meet.arrive_and_wait();  // the filler has arrived
        const Floats next = numbers(kWithdrawnCount, 7);
        TestWork work = send(engine, 1, 4, next);
        control.let_pass(0, Relay::kAnyPace);
        check(work);
      },
      [&](TestEngine& engine) {
        meet.arrive_and_wait();
        meet.arrive_and_wait();  // the message was withdrawn
        Floats data(kWithdrawnCount);
        TestWork work = receive(engine, 0, 4, data);
        const Status early = work.wait(500);
        meet.arrive_and_wait();
        CHECK_EQUAL(early.code, SPARKHVD_PENDING);
        check(work);
        CHECK(data == numbers(kWithdrawnCount, 7));
      });
}

TEST(a_receive_whose_message_was_withdrawn_gets_the_next_before_later_ones) {
  Relay control;
  after_a_withdrawal(
      control, [](TestEngine&) {},
      [](TestEngine& engine) {
        const Floats first = numbers(kWithdrawnCount, 1);
        const Floats second = numbers(kWithdrawnCount, 2);
        TestWork works[] = {send(engine, 1, 4, first), send(engine, 1, 4, second)};
        TestWork all = send(engine, 1, 5, Floats{1});
        for (auto& work : works) check(work);
      },
      [&](TestEngine& engine) {
        control.let_pass(1, 0);
        Floats data[] = {Floats(kWithdrawnCount), Floats(kWithdrawnCount)};
        TestWork works[] = {receive(engine, 0, 4, data[0]), receive(engine, 0, 4, data[1])};
        Floats one(1);
        TestWork all = receive(engine, 0, 5, one);
        check(all);
        control.let_pass(1, Relay::kAnyPace);
        for (auto& work : works) check(work);
        CHECK(data[0] == numbers(kWithdrawnCount, 1));
        CHECK(data[1] == numbers(kWithdrawnCount, 2));
      });
}

TEST(receives_keep_their_order_when_the_message_of_the_first_is_withdrawn) {
  Relay control;
  std::vector<TestWork> works;
  const Floats messages[] = {numbers(kWithdrawnCount, 1), numbers(kWithdrawnCount, 2),
                             numbers(kWithdrawnCount, 3)};
  after_a_withdrawal(
      control,
      [&](TestEngine& engine) {
        for (const auto& message : std::span(messages).first(2)) {
          works.push_back(send(engine, 1, 4, message));
        }
        works.push_back(send(engine, 1, 6, Floats{1}));
      },
      [&](TestEngine& engine) {
        works.push_back(send(engine, 1, 4, messages[2]));
        works.push_back(send(engine, 1, 7, Floats{1}));
        for (auto& work : works) check(work);
      },
      [&](TestEngine& engine) {
        Floats one(1);
        TestWork announced = receive(engine, 0, 6, one);
        check(announced);
        control.let_pass(1, 0);
        // The first three receives match the withdrawn message and the messages after it.
        Floats data[] = {Floats(kWithdrawnCount), Floats(kWithdrawnCount), Floats(kWithdrawnCount)};
        std::vector<TestWork> receives;
        for (auto& each : data) receives.push_back(receive(engine, 0, 4, each));
        TestWork withdrawn = receive(engine, 0, 7, one);
        check(withdrawn);
        control.let_pass(1, Relay::kAnyPace);
        for (auto& work : receives) check(work);
        for (int i = 0; i < 3; ++i) CHECK(data[i] == messages[i]);
      });
}

TEST(a_small_message_keeps_its_place_behind_one_that_is_withdrawn) {
  Relay control;
  std::vector<TestWork> works;
  const Floats first = numbers(5, 1);
  const Floats second{};
  after_a_withdrawal(
      control,
      [&](TestEngine& engine) {
        works.push_back(send(engine, 1, 4, first));
        works.push_back(send(engine, 1, 6, Floats{1}));
      },
      [&](TestEngine& engine) {
        works.push_back(send(engine, 1, 4, second));
        works.push_back(send(engine, 1, 7, Floats{1}));
        for (auto& work : works) check(work);
      },
      [&](TestEngine& engine) {
        Floats one(1);
        TestWork announced = receive(engine, 0, 6, one);
        check(announced);
        control.let_pass(1, 0);
        // The first receive accepts the message that is withdrawn later, and then waits for the first small message.
        // Meanwhile the second receive also waits for it.
        Floats data[] = {Floats(kWithdrawnCount), Floats(kWithdrawnCount)};
        std::vector<TestWork> receives;
        for (auto& each : data) receives.push_back(receive(engine, 0, 4, each, -1, true));
        TestWork withdrawn = receive(engine, 0, 7, one);
        check(withdrawn);
        control.let_pass(1, Relay::kAnyPace);
        for (auto& work : receives) check(work);
        CHECK_EQUAL(result_of(receives[0]).rows.at(2), std::int64_t{5 * sizeof(float)});
        CHECK(std::ranges::equal(std::span(data[0]).first(5), first));
        CHECK_EQUAL(result_of(receives[1]).rows.at(2), 0);
      });
}

TEST(a_receive_whose_message_goes_to_an_earlier_one_gets_the_next_while_the_bytes_move) {
  Relay control;
  Relay tensors;
  std::vector<TestWork> works;
  const Floats large = numbers(kWithdrawnCount, 1);
  const Floats small = numbers(5, 2);
  const Floats empty{};
  after_a_withdrawal(
      control,
      [&](TestEngine& engine) {
        works.push_back(send(engine, 1, 4, large));
        works.push_back(send(engine, 1, 6, Floats{1}));
      },
      [&](TestEngine& engine) {
        works.push_back(send(engine, 1, 7, Floats{1}));
        Floats one(1);
        TestWork accepted = receive(engine, 1, 8, one);
        check(accepted);
        works.push_back(send(engine, 1, 4, small));
        works.push_back(send(engine, 1, 4, empty));
        works.push_back(send(engine, 1, 9, Floats{1}));
        for (auto& work : works) check(work);
      },
      [&](TestEngine& engine) {
        Floats one(1);
        TestWork announced = receive(engine, 0, 6, one);
        check(announced);
        control.let_pass(1, 0);
        tensors.let_pass(0, 0);
        Floats data[] = {Floats(kWithdrawnCount), Floats(kWithdrawnCount), Floats(kWithdrawnCount)};
        std::vector<TestWork> receives;
        for (auto& each : data) receives.push_back(receive(engine, 0, 4, each, -1, true));
        TestWork withdrawn = receive(engine, 0, 7, one);
        check(withdrawn);
        TestWork accepted = send(engine, 0, 8, Floats{1});
        control.let_pass(1, Relay::kAnyPace);
        TestWork small_ones = receive(engine, 0, 9, one);
        check(small_ones);
        tensors.let_pass(0, Relay::kAnyPace);
        for (auto& work : receives) check(work);
        check(accepted);
        CHECK(data[0] == large);
        CHECK_EQUAL(result_of(receives[1]).rows.at(2), std::int64_t{5 * sizeof(float)});
        CHECK(std::ranges::equal(std::span(data[1]).first(5), small));
        CHECK_EQUAL(result_of(receives[2]).rows.at(2), 0);
      },
      &tensors);
}

TEST(what_moves_slowly_takes_longer_than_its_timeout) {
  constexpr std::size_t kCount = 1200000;
  Relay tensors;
  // A sender sees that bytes move only when its socket has room for a large part of its buffer again.
  tensors.let_pass(0, 4 << 10);
  run_ranks(
      world({0, 1}),
      [&](TestEngine& engine, std::int32_t rank) {
        constexpr double kTimeout_s = 0.5;
        const auto begin = std::chrono::steady_clock::now();
        Floats data[] = {numbers(kCount, 1 + 2 * rank), numbers(kCount, 2 + 2 * rank)};
        std::vector<TestWork> works;
        for (auto& message : data) {
          works.push_back(rank == 0 ? send(engine, 1, 4, message, kTimeout_s)
                                    : receive(engine, 0, 4, message, kTimeout_s));
        }
        for (auto& work : works) check(work);
        CHECK(data[0] == numbers(kCount, 1));
        CHECK(data[1] == numbers(kCount, 2));
        Request barrier(SPARKHVD_BARRIER, "barrier");
        CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
        Floats all = numbers(kCount, rank);
        Request request(SPARKHVD_BROADCAST, "broadcast");
        request.tensor(all.data(), all.data(), {kCount}).raw().timeout_s = kTimeout_s;
        TestWork broadcast = engine.submit(request.raw());
        check(broadcast);
        CHECK(all == numbers(kCount, 0));
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        CHECK(took.count() > 4 * kTimeout_s);
      },
      [&](auto& sockets) { tensors.join(sockets[0][3], sockets[1][2]); });
}

TEST(ranks_of_an_island_wait_while_one_receives_slowly) {
  Relay tensors;
  tensors.let_pass(1, 30);
  run_ranks(
      world({0, 0, 1}),
      [&](TestEngine& engine, std::int32_t rank) {
        Floats data = numbers(15000, rank);
        Request request(SPARKHVD_BROADCAST, "broadcast");
        request.tensor(data.data(), data.data(), {15000}).raw().timeout_s = 0.5;
        request.raw().root_rank = 2;
        TestWork work = engine.submit(request.raw());
        check(work);
        CHECK(data == numbers(15000, 2));
        Request barrier(SPARKHVD_BARRIER, "barrier");
        CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
      },
      [&](auto& sockets) { tensors.join(sockets[0][5], sockets[2][3]); });
}

TEST(what_stops_in_the_middle_fails_after_its_timeout) {
  constexpr std::size_t kCount = 2400000;
  for (const bool is_message : {true, false}) {
    Relay tensors;
    tensors.let_pass(0, 4 << 10);
    run_ranks(
        world({0, 1}),
        [&](TestEngine& engine, std::int32_t rank) {
          Floats data = numbers(kCount, rank);
          Request request(SPARKHVD_BROADCAST, "broadcast");
          request.tensor(data.data(), data.data(), {kCount}).raw().timeout_s = 1;
          TestWork work = !is_message ? engine.submit(request.raw())
                          : rank == 0 ? send(engine, 1, 4, data, 1)
                                      : receive(engine, 0, 4, data, 1);
          while (tensors.passed(0) < 1200000) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          tensors.let_pass(0, 0);
          const auto begin = std::chrono::steady_clock::now();
          check_says(work.wait(), SPARKHVD_TIMEOUT, "stopped in the middle");
          const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
          CHECK(took.count() > 0.5 && took.count() < 1.8);
        },
        [&](auto& sockets) { tensors.join(sockets[0][3], sockets[1][2]); });
  }
}

TEST(messages_of_a_rank_that_leaves_can_still_be_received_and_others_end) {
  for (const auto& options : {world(one_host(2)), world({0, 1}), world({0, 1, 1})}) {
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const Floats small = numbers(100, 3);
      if (rank == 0) {
        TestWork work = send(engine, 1, 1, small);
        check(work);
        engine.shutdown();
        return;
      }
      if (rank != 1) return;
      Floats large(100000);
      Floats data(100);
      TestWork waits = receive(engine, 0, 2, large);
      check_says(waits.wait(), SPARKHVD_SHUT_DOWN, "rank 0 shut down");
      TestWork sent = send(engine, 1, 1, small);  // to itself
      TestWork work = receive(engine, 0, 1, data);
      check(work);
      CHECK(data == small);
      TestWork own = receive(engine, kAny, 1, data);
      check(own);
      check(sent);
      CHECK_EQUAL(result_of(own).rows.at(0), std::int64_t{1});
      Request request(SPARKHVD_SEND, "late");
      request.tensor(small.data(), nullptr, {100}).numbers({1}).raw().root_rank = 0;
      Status status;
      TestWork late = engine.submit(request.raw(), &status);
      if (status.code == SPARKHVD_OK) status = late.wait();
      check_says(status, SPARKHVD_SHUT_DOWN, "rank 0");
    });
  }
}

TEST(messages_in_a_process_set_are_not_those_of_another) {
  run_ranks(world({0, 0, 1}), [](TestEngine& engine, std::int32_t rank) {
    Request add(SPARKHVD_ADD_PROCESS_SET, "pair");
    TestWork added = engine.submit(add.numbers({0, 2}).raw());
    check(added);
    const auto pair = static_cast<std::int32_t>(result_of(added).rows.at(0));
    if (rank == 1) return;
    Floats sent{1};
    Floats data(1);
    const auto in_pair = [&](std::int32_t collective, std::int32_t peer) {
      Request request(collective, next_name());
      request.tensor(sent.data(), data.data(), {1}).numbers({0}).on(pair).raw().root_rank = peer;
      Status status;
      TestWork work = engine.submit(request.raw(), &status);
      return std::pair(std::move(work), status);
    };
    check_says(in_pair(SPARKHVD_SEND, 1).second, SPARKHVD_INVALID_ARGUMENT,
               "is not in the process set");
    check_says(in_pair(SPARKHVD_SEND, kAny).second, SPARKHVD_INVALID_ARGUMENT, "rank -1");
    if (rank == 0) {
      TestWork in_world = send(engine, 2, 0, Floats{5});
      check(in_world);
      auto [work, status] = in_pair(SPARKHVD_SEND, 2);
      check(work);
    } else {
      auto [work, status] = in_pair(SPARKHVD_RECEIVE, 0);
      check(work);
      CHECK_EQUAL(data[0], 1.0F);
      TestWork in_world = receive(engine, 0, 0, data);
      check(in_world);
      CHECK_EQUAL(data[0], 5.0F);
    }
  });
}

TEST(messages_that_a_process_set_leaves_behind_take_no_room) {
  for (const auto& options : {world(one_host(2)), world({0, 1})}) {
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      const Floats sent = numbers(3000, rank);
      std::vector<TestWork> works;  // messages without room end with their process set
      for (int i = 0; i < 60; ++i) {
        Request add(SPARKHVD_ADD_PROCESS_SET, "add");
        TestWork added = engine.submit(add.numbers({0, 1}).raw());
        check(added);
        const auto pair = result_of(added).rows.at(0);
        if (rank == 0) {
          Request request(SPARKHVD_SEND, "never asked for");
          request.tensor(sent.data(), nullptr, {3000}).numbers({0});
          request.on(static_cast<std::int32_t>(pair)).raw().root_rank = 1;
          works.push_back(engine.submit(request.raw()));
        }
        Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
        TestWork removed = engine.submit(remove.numbers({pair}).raw());
        check(removed);
      }
      Floats received(3000);
      TestWork work = rank == 0 ? send(engine, 1, 0, sent) : receive(engine, 0, 0, received);
      check(work);
      const auto meet = [&] {
        Request barrier(SPARKHVD_BARRIER, "barrier");
        CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
      };
      meet();
      if (rank == 0) {
        TestWork at_once = send(engine, 1, 1, sent, 2);
        check(at_once);
      }
      meet();  // waits, because a rank that has left receives nothing
    });
  }
}

TEST(messages_meet_the_first_receive_that_they_fit) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    Matching<int, int> matching;
    // The model: lists in the order of submission and arrival, searched from the beginning.
    std::vector<std::pair<Address, int>> receives;
    std::vector<std::pair<Address, int>> messages;
    const auto fits = [](const Address& receive, const Address& message) {
      return receive.process_set == message.process_set && receive.tag == message.tag &&
             (receive.from == kAnyRank || receive.from == message.from);
    };
    for (int i = 0; i < 300; ++i) {
      Address address{static_cast<std::int32_t>(random() % 2),
                      Rank{static_cast<std::int32_t>(random() % 3)},
                      static_cast<std::int32_t>(random() % 2)};
      if (random() % 2 == 0) {
        if (random() % 3 == 0) address.from = kAnyRank;
        const auto found = matching.post(address, i);
        const auto wanted = std::ranges::find_if(
            messages, [&](const auto& message) { return fits(address, message.first); });
        CHECK_EQUAL(found.has_value(), wanted != messages.end());
        if (found) {
          CHECK_EQUAL(found->message, wanted->second);
          messages.erase(wanted);
        } else {
          receives.emplace_back(address, i);
        }
      } else {
        const auto found = matching.arrive(address, int{i});
        const auto wanted = std::ranges::find_if(
            receives, [&](const auto& receive) { return fits(receive.first, address); });
        CHECK_EQUAL(found.has_value(), wanted != receives.end());
        if (found) {
          CHECK_EQUAL(found->receive, wanted->second);
          receives.erase(wanted);
        } else {
          messages.emplace_back(address, i);
        }
      }
    }
    CHECK_EQUAL(matching.posted().size(), receives.size());
    CHECK_EQUAL(matching.arrived().size(), messages.size());
  }
}

TEST(receives_whose_messages_were_withdrawn_wait_in_their_old_order) {
  Matching<int, int> matching;
  const Address address{0, Rank{1}, 5};
  for (const int place : {1, 2, 3}) CHECK(!matching.post(address, place, place));
  CHECK_EQUAL(matching.arrive(address, 0)->receive, 1);
  CHECK_EQUAL(matching.arrive(address, 0)->receive, 2);
  for (const int place : {1, 2}) CHECK(!matching.post(address, place, place));
  CHECK(!matching.post(address, 4, 4));
  for (const int place : {1, 2, 3, 4}) CHECK_EQUAL(matching.arrive(address, 0)->receive, place);
}

}  // namespace sparkhvd::test::point_to_point_test
