// Operations in flight without an engine: from the request until the driver takes it.
#include "engine/in_flight.h"

#include "test.h"

namespace sparkhvd::test::in_flight_test {
namespace {

struct NoFailing final : Failing {
  void spread(std::int32_t, const std::string&) override {}
  void let_go() noexcept override {}
};

std::shared_ptr<Operation> allreduce_of(const std::string& name) {
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->descriptor.collective = Collective::kAllreduce;
  return operation;
}

TEST(what_is_submitted_behind_an_abort_is_refused_before_the_driver_takes_it) {
  const Membership membership{Rank{1}, {0, 0, 0}};
  Recorder recorder(Rank{1}, 3);
  NoFailing failing;
  InFlight in_flight(membership, recorder, failing, [] {});
  in_flight.announce(0, {Rank{0}, Rank{1}, Rank{2}});
  in_flight.submit(allreduce_of("before"));
  CHECK(in_flight.request_abort("the loss is NaN"));
  try {
    in_flight.submit(allreduce_of("behind"));
    CHECK_MESSAGE(false, "not refused");
  } catch (const Error& error) {
    CHECK_EQUAL(error.status(), SPARKHVD_SHUT_DOWN);
    CHECK_EQUAL(std::string(error.what()), "allreduce('behind'): rank 1 aborted: the loss is NaN");
  }
  const InFlight::Requests requests = in_flight.take();
  CHECK_EQUAL(requests.operations.size(), 1U);
  CHECK_EQUAL(requests.operations.front()->name, "before");
  CHECK_EQUAL(*requests.abort_reason, "rank 1 aborted: the loss is NaN");
}

/// Records the loss of a rank before it ends all operations, as an engine does.
struct EndsAll final : Failing {
  InFlight* in_flight = nullptr;
  void spread(std::int32_t status, const std::string& message) override {
    in_flight->finish_all(status, message);
  }
  void let_go() noexcept override {}
};

TEST(what_is_submitted_between_a_loss_and_its_failure_ends_with_the_cause) {
  const Membership membership{Rank{0}, {0, 0}};
  Recorder recorder(Rank{0}, 2);
  EndsAll failing;
  InFlight in_flight(membership, recorder, failing, [] {});
  failing.in_flight = &in_flight;
  in_flight.announce(0, {Rank{0}, Rank{1}});
  in_flight.note({Rank{1}, LossKind::kDead});
  const auto operation = allreduce_of("x");
  in_flight.submit(operation);
  in_flight.fail(SPARKHVD_PEER_LOST, "rank 1 is lost: it sent nonsense");
  CHECK_EQUAL(operation->status.load(), SPARKHVD_PEER_LOST);
  CHECK_EQUAL(operation->message, "allreduce('x'): rank 1 is lost: it sent nonsense");
}

TEST(what_needs_a_rank_that_has_left_is_refused) {
  const Membership membership{Rank{0}, {0, 0}};
  Recorder recorder(Rank{0}, 2);
  NoFailing failing;
  InFlight in_flight(membership, recorder, failing, [] {});
  in_flight.announce(0, {Rank{0}, Rank{1}});
  in_flight.depart(Rank{1});
  try {
    in_flight.submit(allreduce_of("x"));
    CHECK_MESSAGE(false, "not refused");
  } catch (const Error& error) {
    CHECK_EQUAL(error.status(), SPARKHVD_SHUT_DOWN);
    CHECK_MESSAGE(std::string(error.what()).starts_with("allreduce('x'): rank 1 shut down before"),
                  error.what());
  }
}

TEST(an_operation_of_a_removed_process_set_names_no_rank_that_has_left) {
  const Membership membership{Rank{1}, {0, 0, 0}};
  Recorder recorder(Rank{1}, 3);
  NoFailing failing;
  InFlight in_flight(membership, recorder, failing, [] {});
  in_flight.announce(1, {Rank{1}, Rank{2}});
  const auto operation = allreduce_of("x");  // created while the process set existed
  operation->process_set = 1;
  in_flight.withdraw(1);
  in_flight.depart(Rank{0});
  try {
    in_flight.submit(operation);
    CHECK_MESSAGE(false, "not refused");
  } catch (const Error& error) {
    CHECK_EQUAL(error.status(), SPARKHVD_INVALID_ARGUMENT);
    CHECK_EQUAL(std::string(error.what()), "allreduce('x'): its process set was removed.");
  }
}

}  // namespace
}  // namespace sparkhvd::test::in_flight_test
