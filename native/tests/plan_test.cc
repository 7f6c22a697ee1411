// Repeated operations (the plan): ranks send numbers, and the results are right even if a step differs.
#include <algorithm>
#include <numeric>
#include <random>

#include "engine/negotiation.h"
#include "error.h"
#include "world.h"

namespace sparkhvd::test::plan_test {
namespace {

using Floats = std::vector<float>;

constexpr Rank kRank0{0};
constexpr Rank kRank1{1};
constexpr Rank kRank2{2};
const TimePoint kStart{};

TimePoint at(double seconds) { return deadline_after(kStart, seconds); }

Ready gather(const std::string& name, std::int64_t rows, std::int64_t columns = 3) {
  Ready message;
  message.name = name;
  message.descriptor.collective = Collective::kAllgather;
  message.descriptor.dtype = DType::kFloat32;
  message.descriptor.shapes = {{rows, columns}};
  return message;
}

class Three : public Negotiation {
 public:
  Three() : Negotiation({0, {kRank0, kRank1, kRank2}, 0}) {}

  /// Submits descriptions of an allgather of 1, 2 and `rows` rows from the three ranks.
  Outcome describe(const std::string& name, std::int64_t rows) {
    ready(kRank2, gather(name, rows), kStart);
    ready(kRank0, gather(name, 1), kStart);
    return ready(kRank1, gather(name, 2), kStart);
  }
  Outcome all_again(std::uint32_t number) {
    ready_again(kRank1, number, kStart);
    ready_again(kRank2, number, kStart);
    return ready_again(kRank0, number, kStart);
  }
};

template <class Message>
const Message& only(const Negotiation::Outcome& outcome) {
  CHECK_EQUAL(outcome.decisions.size(), 1U);
  const auto* message = std::get_if<Message>(&outcome.decisions[0].message);
  CHECK(message != nullptr);
  return *message;
}

float value(std::int32_t rank, std::size_t index, std::size_t step) {
  return static_cast<float>((index * 7 + static_cast<std::size_t>(rank) * 13 + step * 5) % 31);
}

std::size_t sum_of_ranks(std::size_t size) { return size * (size + 1) / 2; }

/// An operation of a step, its tensors, and its expected result.
struct Step {
  TestWork work;
  Floats data;
  Floats expected;
  bool is_agreed;  // true: the engine allocates the result
};

/// Submits operation `which` of a step with about `count` elements. The number `which` determines the collective.
Step submit(TestEngine& engine, std::int32_t rank, std::int32_t size, std::size_t which,
            std::size_t count, std::size_t step) {
  const auto ranks = static_cast<std::size_t>(size);
  const auto me = static_cast<std::size_t>(rank);
  const std::string name = "operation " + std::to_string(which);
  const auto rows = [&](std::size_t of_rank) { return count % 5 + of_rank; };
  Floats data;
  Floats expected;
  if (which % 4 == 1) {  // rows that differ by rank
    for (std::size_t i = 0; i < rows(me); ++i) data.push_back(value(rank, i, step));
    for (std::int32_t from = 0; from < size; ++from) {
      for (std::size_t i = 0; i < rows(static_cast<std::size_t>(from)); ++i) {
        expected.push_back(value(from, i, step));
      }
    }
    Request request(SPARKHVD_ALLGATHER, name);
    request.tensor(data.data(), nullptr, {static_cast<std::int64_t>(data.size())});
    return {engine.submit(request.raw()), std::move(data), std::move(expected), true};
  }
  if (which % 4 == 2) {  // rank r sends r' + 1 rows to each rank r'
    for (std::size_t i = 0; i < sum_of_ranks(ranks); ++i) data.push_back(value(rank, i, step));
    std::vector<std::int64_t> splits(ranks);
    std::iota(splits.begin(), splits.end(), 1);
    for (std::int32_t from = 0; from < size; ++from) {
      for (std::size_t i = 0; i <= me; ++i) {
        expected.push_back(value(from, sum_of_ranks(me) + i, step));
      }
    }
    Request request(SPARKHVD_ALLTOALL, name);
    request.tensor(data.data(), nullptr, {static_cast<std::int64_t>(data.size())}).numbers(splits);
    return {engine.submit(request.raw()), std::move(data), std::move(expected), true};
  }
  const bool is_broadcast = which % 4 == 3;
  const auto root = static_cast<std::int32_t>(which % ranks);
  for (std::size_t i = 0; i < count; ++i) {
    data.push_back(value(rank, i, step));
    float sum = 0;
    for (std::int32_t from = 0; from < size; ++from) sum += value(from, i, step);
    expected.push_back(is_broadcast ? value(root, i, step) : sum);
  }
  Request request(is_broadcast ? SPARKHVD_BROADCAST : SPARKHVD_ALLREDUCE, name);
  request.tensor(data.data(), data.data(), {static_cast<std::int64_t>(data.size())});
  request.raw().root_rank = is_broadcast ? root : 0;
  return {engine.submit(request.raw()), std::move(data), std::move(expected), false};
}

void check(Step& step) {
  CHECK_EQUAL(step.work.wait().message, "");
  if (step.is_agreed) step.data = result_of(step.work).data;
  CHECK(step.data == step.expected);
}

WorldOptions world(std::vector<std::int32_t> hosts, bool use_tcp = false) {
  WorldOptions options;
  options.hosts = std::move(hosts);
  options.use_tcp = use_tcp;
  return options;
}

std::uint64_t sent_bytes(TestEngine& engine) {
  std::string text(sparkhvd_engine_counters(engine.get(), nullptr, 0) + 64, '\0');
  sparkhvd_engine_counters(engine.get(), text.data(), text.size());
  const std::string key = "\"sent_bytes\":";
  return std::stoull(text.substr(text.find(key) + key.size()));
}

}  // namespace

TEST(an_operation_that_comes_again_is_told_by_its_number) {
  Three negotiation;
  CHECK(!only<Execute>(negotiation.describe("a", 3)).number);
  CHECK(!only<Execute>(negotiation.describe("b", 3)).number);
  CHECK_EQUAL(*only<Execute>(negotiation.describe("b", 3)).number, 0U);
  CHECK_EQUAL(*only<Execute>(negotiation.describe("a", 3)).number, 1U);
  const auto outcome = negotiation.all_again(1);
  CHECK_EQUAL(only<Again>(outcome).number, 1U);
  CHECK_EQUAL(only<Again>(outcome).sequence, 4U);
  CHECK(outcome.decisions[0].to == (std::vector<Rank>{kRank0, kRank1, kRank2}));
  CHECK_EQUAL(only<Again>(negotiation.all_again(0)).sequence, 5U);
  CHECK_THROWS(Error, negotiation.ready_again(kRank0, 2, kStart));
  negotiation.ready_again(kRank1, 0, kStart);
  CHECK_THROWS(Error, negotiation.ready_again(kRank1, 0, kStart));
}

TEST(who_describes_something_else_is_compared_with_what_the_numbers_mean) {
  Three negotiation;
  negotiation.describe("a", 3);
  negotiation.describe("a", 3);
  // Other rows are not a mistake: the order has them. If they come again, the number stands for them.
  negotiation.ready_again(kRank0, 0, kStart);
  negotiation.ready(kRank2, gather("a", 7), kStart);
  const auto other = negotiation.ready_again(kRank1, 0, kStart);
  CHECK(only<Execute>(other).rows == (std::vector<std::int64_t>{1, 2, 7}));
  CHECK(!only<Execute>(other).number);
  CHECK(only<Again>(negotiation.all_again(0)).number == 0);  // with the old rows of rank 2
  negotiation.ready_again(kRank0, 0, kStart);
  negotiation.ready_again(kRank1, 0, kStart);
  CHECK_EQUAL(*only<Execute>(negotiation.ready(kRank2, gather("a", 7), kStart)).number, 0U);
  negotiation.ready_again(kRank0, 0, kStart);
  negotiation.ready_again(kRank1, 0, kStart);
  const auto mismatch = negotiation.ready(kRank2, gather("a", 7, 4), kStart);
  CHECK_EQUAL(only<Refuse>(mismatch).status, SPARKHVD_MISMATCH);
  const std::string text = only<Refuse>(mismatch).message;
  CHECK_MESSAGE(text.find("(1, 3) float32, rank 2 sent (7, 4)") != std::string::npos, text);
  CHECK_EQUAL(only<Again>(negotiation.all_again(0)).number, 0U);
}

TEST(numbers_wait_are_refused_and_go_on_as_descriptions_do) {
  Three negotiation;
  const auto patient = [&](Rank rank) {
    Ready message = gather("a", 1);
    message.descriptor.timeout_s = 2;
    return negotiation.ready(rank, message, kStart);
  };
  for (int i = 0; i < 2; ++i) {
    for (const Rank rank : {kRank0, kRank1, kRank2}) patient(rank);
  }
  negotiation.ready_again(kRank0, 0, kStart);
  negotiation.ready_again(kRank2, 0, at(1));
  CHECK(negotiation.next_deadline() <= at(2));
  const auto outcome = negotiation.tick(at(2));
  CHECK(outcome.decisions.at(0).to == (std::vector<Rank>{kRank0, kRank2}));
  CHECK_EQUAL(only<Refuse>(outcome).status, SPARKHVD_TIMEOUT);
  CHECK(only<Refuse>(negotiation.ready_again(kRank1, 0, at(3))).status == SPARKHVD_TIMEOUT);
  CHECK_EQUAL(only<Again>(negotiation.all_again(0)).number, 0U);
  negotiation.ready_again(kRank1, 0, at(4));
  const auto left = negotiation.departed(kRank2);
  CHECK(left.decisions.at(0).to == (std::vector<Rank>{kRank1}));
  CHECK_EQUAL(only<Refuse>(left).status, SPARKHVD_SHUT_DOWN);
  CHECK_EQUAL(only<Refuse>(negotiation.ready_again(kRank0, 0, at(5))).status, SPARKHVD_SHUT_DOWN);
}

TEST(names_beyond_the_plan_are_described_each_time) {
  Three negotiation;
  const auto twice = [&](std::size_t which) {
    negotiation.describe(std::to_string(which), 3);
    return negotiation.describe(std::to_string(which), 3);
  };
  for (std::size_t i = 0; i < Negotiation::kMaxPlanned; ++i) CHECK(only<Execute>(twice(i)).number);
  CHECK(!only<Execute>(twice(Negotiation::kMaxPlanned)).number);
  for (std::size_t i = 0; i < 10000; ++i) negotiation.describe("never again", 3 + (i & 1));
  CHECK_EQUAL(only<Again>(negotiation.all_again(7)).number, 7U);
}

TEST(a_plan_changes_no_results_where_steps_differ) {
  const std::vector<WorldOptions> worlds = {world(one_host(1)), world(one_host(3)),
                                            world({0, 1, 2, 3}, true), world({0, 0, 1, 1, 2})};
  for (const auto& options : worlds) {
    const auto size = static_cast<std::int32_t>(options.hosts.size());
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      std::mt19937 shared(7);  // determines the steps, equally on every rank
      std::mt19937 own(static_cast<unsigned>(rank));
      constexpr std::size_t kOperations = 12;
      for (std::size_t step = 0; step < 30; ++step) {
        std::vector<std::size_t> counts;
        for (std::size_t i = 0; i < kOperations; ++i) counts.push_back(i * i * 97 % 6000 + i);
        const bool differs = step > 3 && shared() % 3 == 0;
        const std::size_t changed = shared() % kOperations;
        const std::size_t dropped = shared() % kOperations;
        if (differs) counts[changed] = shared() % 3000 + 1;
        std::vector<std::size_t> order(kOperations);
        std::iota(order.begin(), order.end(), 0U);
        if (differs) std::erase(order, dropped);
        if (step % 4 == 3) std::shuffle(order.begin(), order.end(), own);
        std::vector<Step> steps;
        for (const std::size_t which : order) {
          steps.push_back(submit(engine, rank, size, which, counts[which], step));
          if (own() % 8 == 0) steps.back().work.wait(0);
        }
        for (auto& each : steps) check(each);
      }
    });
  }
}

TEST(ranks_that_have_joined_are_done_without_in_steps_of_the_plan) {
  run_ranks(world({0, 1, 2}, true), [](TestEngine& engine, std::int32_t rank) {
    const auto step = [&](float expected) {
      std::vector<Floats> data(4, Floats(10, 1));
      std::vector<TestWork> works;
      for (std::size_t i = 0; i < data.size(); ++i) {
        Request request(SPARKHVD_ALLREDUCE, "operation " + std::to_string(i));
        request.tensor(data[i].data(), data[i].data(), {10});
        works.push_back(engine.submit(request.raw()));
      }
      for (std::size_t i = 0; i < data.size(); ++i) {
        CHECK_EQUAL(works[i].wait().message, "");
        CHECK(data[i] == Floats(10, expected));
      }
    };
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 4; ++i) step(3);
      for (int i = 0; i < (rank == 1 ? 0 : 3); ++i) step(2);
      Request join(SPARKHVD_JOIN, "join");
      TestWork work = engine.submit(join.raw());
      CHECK_EQUAL(work.wait().message, "");
    }
    step(3);
  });
}

TEST(steps_of_the_plan_need_few_bytes_to_agree) {
  run_ranks(world({0, 1, 2, 3}, true), [](TestEngine& engine, std::int32_t rank) {
    const std::string layer(200, 'x');
    const auto bytes_of_step = [&] {
      const std::uint64_t before = sent_bytes(engine);
      std::vector<Floats> data(32, Floats(1, 1));
      std::vector<TestWork> works;
      for (std::size_t i = 0; i < data.size(); ++i) {
        Request request(SPARKHVD_ALLREDUCE, layer + std::to_string(i));
        request.tensor(data[i].data(), data[i].data(), {1});
        works.push_back(engine.submit(request.raw()));
      }
      for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
      return sent_bytes(engine) - before;
    };
    const std::uint64_t described = bytes_of_step();
    bytes_of_step();
    bytes_of_step();
    const std::uint64_t planned = bytes_of_step();
    const std::uint64_t least = rank == 0 ? 3 * 32 * layer.size() : 32 * layer.size();
    CHECK(described > least);
    CHECK_MESSAGE(planned + least < described,
                  std::to_string(planned) + " of " + std::to_string(described));
  });
}

}  // namespace sparkhvd::test::plan_test
