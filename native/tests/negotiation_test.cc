// The coordinator's decisions, without sockets and with simulated times.
#include "engine/negotiation.h"

#include "collectives/spec.h"
#include "engine/difference.h"
#include "error.h"
#include "test.h"

namespace sparkhvd::test::negotiation_test {
namespace {

constexpr Rank kRank0{0};
constexpr Rank kRank1{1};
constexpr Rank kRank2{2};
const TimePoint kStart{};

TimePoint at(double seconds) { return deadline_after(kStart, seconds); }

Negotiation of_three(double stall_warning_s = 0) {
  return Negotiation({0, {kRank0, kRank1, kRank2}, stall_warning_s});
}

Ready ready(const std::string& name, std::vector<std::int64_t> shape = {4}, double timeout_s = 0) {
  Ready message;
  message.name = name;
  message.descriptor.timeout_s = timeout_s;
  message.descriptor.dtype = DType::kFloat32;
  message.descriptor.shapes = {std::move(shape)};
  return message;
}

const Execute* executed(const Negotiation::Outcome& outcome) {
  return outcome.decisions.size() == 1 ? std::get_if<Execute>(&outcome.decisions[0].message)
                                       : nullptr;
}

const Refuse* refused(const Negotiation::Outcome& outcome) {
  return outcome.decisions.size() == 1 ? std::get_if<Refuse>(&outcome.decisions[0].message)
                                       : nullptr;
}

}  // namespace

TEST(operations_run_in_the_order_in_which_they_become_complete) {
  Negotiation negotiation = of_three();
  CHECK(negotiation.ready(kRank0, ready("a"), kStart).decisions.empty());
  CHECK(negotiation.ready(kRank1, ready("b"), kStart).decisions.empty());
  CHECK(negotiation.ready(kRank1, ready("a"), kStart).decisions.empty());
  CHECK(negotiation.ready(kRank0, ready("b"), kStart).decisions.empty());
  const auto first = negotiation.ready(kRank2, ready("b"), kStart);
  CHECK(executed(first) != nullptr && executed(first)->name == "b");
  CHECK(executed(first)->sequence == 0);
  CHECK(first.decisions[0].to == (std::vector<Rank>{kRank0, kRank1, kRank2}));
  const auto second = negotiation.ready(kRank2, ready("a"), kStart);
  CHECK(executed(second) != nullptr && executed(second)->sequence == 1);
}

TEST(allgather_orders_carry_every_first_dimension) {
  Negotiation negotiation = of_three();
  const auto gather = [](std::int64_t rows) {
    Ready message = ready("g", {rows, 3});
    message.descriptor.collective = Collective::kAllgather;
    return message;
  };
  negotiation.ready(kRank2, gather(7), kStart);
  negotiation.ready(kRank0, gather(0), kStart);
  const auto outcome = negotiation.ready(kRank1, gather(2), kStart);
  CHECK(executed(outcome) != nullptr);
  CHECK(executed(outcome)->rows == (std::vector<std::int64_t>{0, 2, 7}));
}

TEST(the_table_has_every_collective_at_its_number) {
  const auto table = collective_table();
  CHECK_EQUAL(table.size(), static_cast<std::size_t>(SPARKHVD_NUM_COLLECTIVES));
  for (std::size_t i = 0; i < table.size(); ++i) {
    CHECK_EQUAL(static_cast<std::size_t>(table[i]->collective), i);
    CHECK(table[i]->check != nullptr);
    CHECK((table[i]->enqueue == nullptr) ==
          (table[i]->max_tensors == 0 || *table[i]->device_algorithm == '\0'));
    CHECK((table[i]->result == sparkhvd::Result::kAgreed) == (table[i]->rows_of_result != nullptr));
    CHECK(table[i]->result != sparkhvd::Result::kAgreed ||
          (table[i]->write_rows && table[i]->count_rows && table[i]->are_rows_possible));
  }
}

TEST(orders_ask_for_memory_where_a_result_is_large_or_a_rank_has_none_to_spare) {
  struct Case {
    std::int64_t rows;
    bool lacks_memory;
    bool asks;
  };
  for (const auto& [rows, lacks_memory, asks] :
       {Case{1 << 19, false, false}, {1 << 20, false, true}, {1, true, true}}) {
    Negotiation negotiation = of_three();
    Ready message = ready("g", {rows, 1});
    message.descriptor.collective = Collective::kGather;
    message.descriptor.root = kRank1;
    negotiation.ready(kRank2, message, kStart);
    negotiation.ready(kRank0, message, kStart);
    message.descriptor.lacks_memory = lacks_memory;
    const auto outcome = negotiation.ready(kRank1, message, kStart);
    CHECK(executed(outcome) != nullptr);
    CHECK_EQUAL(executed(outcome)->asks_for_memory, asks);
  }
}

TEST(splits_of_a_scatter_are_the_roots_or_nonsense) {
  const auto scatter = [](std::vector<std::int64_t> splits) {
    Ready message = ready("s", {4, 1});
    message.descriptor.collective = Collective::kScatter;
    message.descriptor.root = kRank1;
    message.descriptor.numbers = std::move(splits);
    return message;
  };
  const auto order = [&](const Ready& of_another, const Ready& of_root) {
    Negotiation negotiation = of_three();
    negotiation.ready(kRank2, of_another, kStart);
    negotiation.ready(kRank0, scatter({}), kStart);
    return negotiation.ready(kRank1, of_root, kStart);
  };
  CHECK(executed(order(scatter({}), scatter({1, 0, 3})))->rows ==
        (std::vector<std::int64_t>{1, 0, 3}));
  CHECK_THROWS(Error, order(scatter({}), scatter({})));
  CHECK_THROWS(Error, order(scatter({1, 0, 3}), scatter({1, 0, 3})));
  CHECK_THROWS(Error, order(scatter({}), scatter({1, 3})));
  CHECK_THROWS(Error, order(scatter({}), scatter({1, -1, 4})));
}

TEST(every_kind_of_disagreement_is_told_with_both_sides) {
  const auto compare = [](auto change) {
    Descriptor a = ready("x").descriptor;
    Descriptor b = a;
    change(b);
    const auto text = difference("x", {kRank0, a}, {kRank2, b});
    return text.value_or("");
  };
  CHECK_EQUAL(compare([](auto&) {}), "");
  CHECK_EQUAL(
      compare([](auto& b) { b.dtype = DType::kFloat64; }),
      "allreduce('x'): ranks disagree on dtype. Rank 0 sent (4,) float32, rank 2 sent (4,) "
      "float64. Build the same model on every rank, or give the two tensors different names.");
  CHECK_EQUAL(compare([](auto& b) { b.collective = Collective::kBroadcast; }),
              "allreduce('x'): ranks disagree on the operation. Rank 0 sent allreduce, rank 2 sent "
              "broadcast. Make the same call on every rank, or use different names.");
  CHECK_EQUAL(compare([](auto& b) { b.prescale = 0.1; }),
              "allreduce('x'): ranks disagree on prescale_factor. Rank 0 sent 1, rank 2 sent 0.1. "
              "Make the same call on every rank, or use different names.");
  CHECK(compare([](auto& b) { b.shapes = {{4, 1}}; }).find("the number of dimensions") !=
        std::string::npos);
  CHECK(compare([](auto& b) { b.shapes.push_back({1}); }).find("the number of tensors") !=
        std::string::npos);
  CHECK(compare([](auto& b) { b.reduce_op = ReduceOp::kMax; }).find("Average") !=
        std::string::npos);
}

TEST(a_timeout_reaches_those_who_waited_and_those_who_come_late) {
  Negotiation negotiation = of_three();
  negotiation.ready(kRank0, ready("x", {4}, 2), kStart);
  negotiation.ready(kRank2, ready("x", {4}, 5), at(1));
  CHECK(negotiation.next_deadline() == at(2));
  CHECK(negotiation.tick(at(1.9)).decisions.empty());
  const auto outcome = negotiation.tick(at(2));
  CHECK(refused(outcome) != nullptr);
  CHECK(outcome.decisions[0].to == (std::vector<Rank>{kRank0, kRank2}));
  CHECK_EQUAL(
      refused(outcome)->message,
      "allreduce('x'): rank 1 did not submit it within 2 s, while ranks 0 and 2 waited. Look "
      "at what the missing rank does, or raise stall_shutdown_s.");
  // The other ranks may submit again before the late rank has received the refusal.
  CHECK(negotiation.ready(kRank0, ready("x"), at(3)).decisions.empty());
  const auto late = negotiation.ready(kRank1, ready("x"), at(3));
  CHECK(refused(late) != nullptr && refused(late)->status == SPARKHVD_TIMEOUT);
  CHECK(late.decisions[0].to == (std::vector<Rank>{kRank1}));
  negotiation.ready(kRank1, ready("x"), at(3));
  CHECK(executed(negotiation.ready(kRank2, ready("x"), at(3))) != nullptr);
}

TEST(a_stall_is_warned_about_again_and_again) {
  Negotiation negotiation = of_three(10);
  negotiation.ready(kRank1, ready("x"), kStart);
  CHECK(negotiation.next_deadline() == at(10));
  CHECK_EQUAL(
      negotiation.tick(at(10)).warnings.at(0),
      "allreduce('x'): waiting for ranks 0 and 2 since 10 s, while rank 1 submitted it. Look "
      "at what the missing rank does.");
  CHECK(negotiation.tick(at(11)).warnings.empty());
  CHECK(negotiation.tick(at(20)).warnings.size() == 1);
}

TEST(operations_after_a_departure_are_refused) {
  Negotiation negotiation = of_three();
  negotiation.ready(kRank0, ready("x"), kStart);
  const auto outcome = negotiation.departed(kRank2);
  CHECK(refused(outcome) != nullptr && refused(outcome)->status == SPARKHVD_SHUT_DOWN);
  CHECK(outcome.decisions[0].to == (std::vector<Rank>{kRank0}));
  CHECK(refused(negotiation.ready(kRank1, ready("x"), kStart)) != nullptr);
  CHECK(refused(negotiation.ready(kRank0, ready("y"), kStart)) != nullptr);
}

}  // namespace sparkhvd::test::negotiation_test
