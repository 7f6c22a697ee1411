// Operations in flight without an engine: between a request and the driver's taking it.
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

}  // namespace
}  // namespace sparkhvd::test::in_flight_test
