// Failures with several process sets, joined ranks, processes that stop at the wrong moment, and ranks that send
// invalid frames.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <limits>
#include <numeric>
#include <random>

#include "engine/negotiation.h"
#include "message.h"
#include "transport/link.h"
#include "world.h"

namespace sparkhvd::test::adversity_test {
namespace {

using Floats = std::vector<float>;
using Numbers = std::vector<std::int64_t>;

WorldOptions world(std::vector<std::int32_t> hosts) {
  WorldOptions options;
  options.hosts = std::move(hosts);
  options.stall_shutdown_s = 10;
  return options;
}

Status run(TestEngine& engine, Request& request) { return engine.submit(request.raw()).wait(); }

std::int32_t add_process_set(TestEngine& engine, const Numbers& ranks) {
  Request request(SPARKHVD_ADD_PROCESS_SET, "add");
  TestWork work = engine.submit(request.numbers(ranks).raw());
  CHECK_EQUAL(work.wait().message, "");
  return static_cast<std::int32_t>(result_of(work).rows.at(0));
}

Request allreduce_of(const std::string& name, Floats& data, std::int32_t process_set = 0) {
  Request request(SPARKHVD_ALLREDUCE, name);
  request.tensor(data.data(), data.data(), {static_cast<std::int64_t>(data.size())});
  request.on(process_set);
  return request;
}

Status sum(TestEngine& engine, const std::string& name, Floats& data,
           std::int32_t process_set = 0) {
  Request request = allreduce_of(name, data, process_set);
  return run(engine, request);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// A rank in a separate process, which can be stopped. Create it while this process has only one thread.
class Child {
 public:
  /// `body` returns the error, or an empty text. The child has only the sockets of its rank.
  Child(const WorldOptions& options, std::vector<std::vector<std::int32_t>>& sockets,
        std::size_t rank, const std::function<std::string(TestEngine&)>& body)
      : pid_(::fork()) {
    if (pid_ == 0) {
      close_all(sockets, rank, false);
      std::string problem;
      try {
        TestEngine engine(options, static_cast<std::int32_t>(rank), sockets[rank]);
        problem = engine.created().message;
        if (problem.empty()) problem = body(engine);
      } catch (const std::exception& error) {
        problem = error.what();
      }
      if (!problem.empty()) std::fprintf(stderr, "child: %s\n", problem.c_str());
      ::_exit(problem.empty() ? 0 : 1);
    }
    CHECK(pid_ > 0);
    close_all(sockets, rank, true);
  }
  Child(const Child&) = delete;
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  void go_on() const { ::kill(pid_, SIGCONT); }
  void wait_until_stopped() const {
    int status = 0;
    CHECK(::waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status));
  }
  /// True if the process ended without an error.
  bool finished() {
    int status = 0;
    const bool ok =
        ::waitpid(pid_, &status, 0) == pid_ && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    pid_ = -1;
    return ok;
  }

 private:
  static void close_all(const std::vector<std::vector<std::int32_t>>& sockets, std::size_t rank,
                        bool own) {
    for (std::size_t i = 0; i < sockets.size(); ++i) {
      if ((i == rank) != own) continue;
      for (const int socket : sockets[i]) {
        if (socket >= 0) ::close(socket);
      }
    }
  }
  pid_t pid_;
};

void stop_myself() { ::raise(SIGSTOP); }

/// Runs all ranks except the rank of the child process, each in a thread.
void run_others(const WorldOptions& options, const std::vector<std::vector<std::int32_t>>& sockets,
                std::size_t child, const std::function<void(TestEngine&, std::int32_t)>& body) {
  std::vector<std::string> problems(options.hosts.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < options.hosts.size(); ++i) {
      if (i == child) continue;
      threads.emplace_back([&, i] {
        const auto rank = static_cast<std::int32_t>(i);
        TestEngine engine(options, rank, sockets[i]);
        try {
          CHECK_EQUAL(engine.created().message, "");
          body(engine, rank);
        } catch (const std::exception& error) {
          problems[i] = "rank " + std::to_string(i) + ": " + error.what();
          if (engine.get() != nullptr) engine.abort("the test failed on this rank");
        }
      });
    }
  }
  for (const auto& problem : problems) {
    if (!problem.empty() && problem.find("the test failed on this rank") == std::string::npos) {
      throw Failure(problem);
    }
  }
}

}  // namespace

// ---- Small and large descriptions
//
// Inside a host, small frames use shared memory and large frames use the connections. Frames that must not overtake
// each other keep their order.

namespace {

constexpr int kRounds = 20;

/// An allreduce of 400 tensors: its description is too large for a frame in shared memory.
struct LargeAllreduce {
  LargeAllreduce(float value, std::int32_t process_set = 0) : data(400, Floats(2, value)) {
    for (auto& tensor : data) request.tensor(tensor.data(), tensor.data(), {2});
    request.on(process_set);
  }
  std::vector<Floats> data;
  Request request{SPARKHVD_ALLREDUCE, "large"};
};

void wait_for(const std::atomic<int>& count, int value) {
  while (count.load() < value) std::this_thread::yield();
}

}  // namespace

TEST(a_join_does_not_overtake_what_was_submitted_before_it) {
  for (const bool is_large : {true, false}) {
    std::atomic<int> turn{0};
    run_ranks(world({0, 0}), [&](TestEngine& engine, std::int32_t rank) {
      for (int round = 1; round <= kRounds; ++round) {
        LargeAllreduce large(static_cast<float>(rank + 1));
        // Each frame fits into the ring, but the ring has no room for all of them.
        std::vector<Floats> many(20, Floats(2, static_cast<float>(rank + 1)));
        std::vector<TestWork> works;
        if (rank == 1) wait_for(turn, round);
        if (is_large) works.push_back(engine.submit(large.request.raw()));
        for (std::size_t i = 0; !is_large && i < many.size(); ++i) {
          Request request = allreduce_of(std::string(850, 'n') + std::to_string(100 + i), many[i]);
          works.push_back(engine.submit(request.raw()));
        }
        if (rank == 0) {
          turn = round;
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        Request join(SPARKHVD_JOIN, "join");
        works.push_back(engine.submit(join.raw()));
        for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
        for (const auto& tensor : is_large ? large.data : many) CHECK(tensor == Floats(2, 3));
      }
    });
  }
}

TEST(a_removal_does_not_overtake_what_was_submitted_before_it) {
  // The set's coordinator is rank 0, which also coordinates the removal, or another rank.
  for (const Numbers& members : {Numbers{0, 1}, Numbers{1, 2}}) {
    std::atomic<int> turn{0};
    const auto first = static_cast<std::int32_t>(members[0]);
    run_ranks(world({0, 0, 0}), [&](TestEngine& engine, std::int32_t rank) {
      for (int round = 1; round <= kRounds; ++round) {
        const auto id = add_process_set(engine, members);
        LargeAllreduce large(1, id);
        Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
        remove.numbers({id});
        if (std::ranges::count(members, rank) == 0) {
          CHECK_EQUAL(run(engine, remove).message, "");
          continue;
        }
        if (rank != first) wait_for(turn, round);
        TestWork work = engine.submit(large.request.raw());
        TestWork removed = engine.submit(remove.raw());
        if (rank == first) {
          turn = round;
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        CHECK_EQUAL(removed.wait().message, "");
        CHECK_EQUAL(work.wait().message, "");
        CHECK(large.data[399] == Floats(2, 2));
      }
    });
  }
}

TEST(a_process_set_that_was_never_complete_refuses_its_operations) {
  auto options = world({0, 0, 0});
  for (int round = 0; round < 60; ++round) {
    options.spin_us = round % 2 == 0 ? 0 : 20;
    std::atomic<int> submitted{0};
    std::atomic<int> coordinator{-1};
    std::atomic<int> done{0};
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      Request add(SPARKHVD_ADD_PROCESS_SET, "add");
      add.numbers({0, 1});
      if (rank == 2) {
        wait_for(submitted, 2);
        std::this_thread::sleep_for(std::chrono::microseconds(300 * (round % 3)));
        TestWork work = engine.submit(add.raw());
        engine.shutdown();  // while the other ranks may be in the middle of the operation
        return;
      }
      TestWork work = engine.submit(add.raw());
      ++submitted;
      const Status added = work.wait();
      if (rank == 0) {
        coordinator = added.code;
        wait_for(done, 1);
        return;
      }
      wait_for(coordinator, SPARKHVD_OK);
      if (added.code != SPARKHVD_OK || coordinator == SPARKHVD_OK) {
        done = 1;
        return;
      }
      Floats data(2, 1);
      const auto id = static_cast<std::int32_t>(result_of(work).rows.at(0));
      const Status refused = sum(engine, "x", data, id);
      done = 1;
      // The operation must not end by its timeout, because no rank is missing.
      CHECK_EQUAL(refused.code, SPARKHVD_SHUT_DOWN);
    });
  }
}

// ---- Process sets

TEST(operations_agreed_on_before_a_removal_run_to_their_end) {
#if defined(SPARKHVD_QUICK)
  constexpr int kRounds = 40;
#else
  constexpr int kRounds = 200;
#endif
  for (const auto& hosts :
       {std::vector<std::int32_t>{0, 0, 0}, std::vector<std::int32_t>{0, 1, 2}}) {
    run_ranks(world(hosts), [&](TestEngine& engine, std::int32_t rank) {
      for (int round = 0; round < kRounds; ++round) {
        const auto id = add_process_set(engine, {1, 2});
        Floats data(10, 1);
        Floats other(100000, 1);
        Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
        remove.numbers({id});
        Request first = allreduce_of("first", other, id);
        Request last = allreduce_of("last", data, id);
        Status status;
        std::vector<TestWork> works;
        // The set's coordinator sends "run" while rank 0 sends "remove", so they arrive in any order.
        if (rank == 2) works.push_back(engine.submit(last.raw()));
        if (rank != 0) works.push_back(engine.submit(first.raw()));
        TestWork removed = engine.submit(remove.raw());
        if (rank == 1) works.push_back(engine.submit(last.raw(), &status));
        CHECK_EQUAL(removed.wait().message, "");
        CHECK_MESSAGE(status.code == SPARKHVD_OK || status.code == SPARKHVD_INVALID_ARGUMENT,
                      status.message);
        for (auto& work : works) {
          if (work.get() == nullptr) continue;
          const Status end = work.wait();
          CHECK_MESSAGE(end.code == SPARKHVD_OK || end.code == SPARKHVD_INVALID_ARGUMENT,
                        end.message);
        }
        if (rank != 0) CHECK(other == Floats(100000, 2));
      }
    });
  }
}

TEST(a_process_set_cannot_be_used_before_it_is_made) {
  const WorldOptions options = world(one_host(2));
  auto sockets = connect_all(2);
  Child child(options, sockets, 1, [](TestEngine& engine) {
    Request add(SPARKHVD_ADD_PROCESS_SET, "add");
    TestWork work = engine.submit(add.numbers({0, 1}).raw());
    stop_myself();
    const Status status = work.wait();
    Floats data(10, 1);
    if (status.code == SPARKHVD_OK) return sum(engine, "x", data, 1).message;
    return status.message;
  });
  run_others(options, sockets, 1, [&](TestEngine& engine, std::int32_t) {
    Request add(SPARKHVD_ADD_PROCESS_SET, "add");
    TestWork work = engine.submit(add.numbers({0, 1}).raw());
    child.wait_until_stopped();
    sleep_ms(50);
    Floats data(10, 1);
    if (work.poll() == SPARKHVD_PENDING) {
      Request early = allreduce_of("early", data, 1);
      Status status;
      engine.submit(early.raw(), &status);
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    }
    child.go_on();
    CHECK_EQUAL(work.wait().message, "");
    CHECK_EQUAL(sum(engine, "x", data, 1).message, "");
  });
  CHECK(child.finished());
}

TEST(process_sets_and_buffers_work_where_one_rank_gets_no_memory) {
  const WorldOptions options = world(one_host(3));
  auto sockets = connect_all(3);
  const auto body = [](TestEngine& engine, std::int32_t rank) {
    Floats data(5000, 1);
    CHECK_EQUAL(sum(engine, "before", data).message, "");
    if (rank == 2) {
      const int lowest = ::dup(0);
      ::close(lowest);
      const rlimit none{static_cast<rlim_t>(lowest), static_cast<rlim_t>(lowest)};
      CHECK(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    }
    const auto id = add_process_set(engine, {0, 1, 2});
    const auto pair = add_process_set(engine, {0, 1});
    for (const std::size_t count : {1UL, 5000UL, 70001UL}) {
      Floats mine(count, 1);
      CHECK_EQUAL(sum(engine, "x", mine, id).message, "");
      CHECK(mine == Floats(count, 3));
      if (rank == 2) continue;
      CHECK_EQUAL(sum(engine, "y", mine, pair).message, "");
      CHECK(mine == Floats(count, 6));
    }
    Request request(SPARKHVD_REGISTER, "register");
    TestWork work = engine.submit(request.numbers({40000}).raw());
    CHECK_EQUAL(work.wait().message, "");
    sparkhvd_buffer* buffer = nullptr;
    char text[1024] = "";
    const auto code = sparkhvd_work_buffer(work.get(), &buffer, text, sizeof(text));
    CHECK_EQUAL(code, rank == 2 ? SPARKHVD_UNSUPPORTED : SPARKHVD_OK);
    Floats own(10000, 1);
    float* place = rank == 2 ? own.data() : static_cast<float*>(sparkhvd_buffer_data(buffer));
    CHECK(sparkhvd_buffer_is_shared(buffer) == 0);
    std::fill_n(place, 10000, 1.0F);
    Request reduce(SPARKHVD_ALLREDUCE, "z");
    CHECK_EQUAL(run(engine, reduce.tensor(place, place, {10000})).message, "");
    CHECK(std::all_of(place, place + 10000, [](float x) { return x == 3; }));
    sparkhvd_buffer_release(buffer);
  };
  Child child(options, sockets, 2, [&](TestEngine& engine) {
    body(engine, 2);
    return std::string();
  });
  run_others(options, sockets, 2, body);
  CHECK(child.finished());
}

TEST(tensors_of_one_process_set_do_not_block_orders_of_another) {
  const WorldOptions options = world({0, 1, 2});
  auto sockets = connect_all(3);
  // Two sets of the same ranks: `first` and `second` are on set b, `other` is on set a.
  const auto submit_first = [](TestEngine& engine, std::int32_t rank, std::int32_t set,
                               Floats& data) {
    Request request(SPARKHVD_ALLTOALL, "first");
    request.tensor(data.data(), nullptr, {1000}).on(set);
    // Only rank 2 sends rows, to rank 1.
    return engine.submit(request.numbers({0, rank == 2 ? 1000 : 0, 0}).raw());
  };
  const auto submit_second = [](TestEngine& engine, std::int32_t rank, std::int32_t set,
                                Floats& data) {
    Request request(SPARKHVD_ALLTOALL, "second");
    request.tensor(data.data(), nullptr, {1000}).on(set);
    return engine.submit(request.numbers({0, rank == 0 ? 1000 : 0, 0}).raw());
  };
  const auto submit_other = [](TestEngine& engine, std::int32_t set, Floats& data) {
    Request request(SPARKHVD_BROADCAST, "other");
    request.tensor(data.data(), data.data(), {1000}).on(set);
    request.raw().root_rank = 2;
    return engine.submit(request.raw());
  };
  Child child(options, sockets, 2, [&](TestEngine& engine) {
    const auto a = add_process_set(engine, {0, 1, 2});
    const auto b = add_process_set(engine, {0, 1, 2});
    Floats data(1000, 2);
    Floats sent(1000, 2);
    auto first = submit_first(engine, 2, b, data);
    auto second = submit_second(engine, 2, b, data);
    auto other = submit_other(engine, a, sent);
    stop_myself();
    std::string problem = first.wait().message;
    problem += second.wait().message;
    return problem + other.wait().message;
  });
  run_others(options, sockets, 2, [&](TestEngine& engine, std::int32_t rank) {
    const auto a = add_process_set(engine, {0, 1, 2});
    const auto b = add_process_set(engine, {0, 1, 2});
    Floats data(1000, 1);
    Floats got(1000, 1);
    auto first = submit_first(engine, rank, b, data);
    auto second = submit_second(engine, rank, b, data);
    if (rank == 0) {
      child.wait_until_stopped();
      CHECK_EQUAL(first.wait().message, "");
      CHECK_EQUAL(second.wait().message, "");  // rank 0's tensor is on its way to rank 1
    }
    auto other = submit_other(engine, a, got);
    if (rank == 0) {
      sleep_ms(50);
      child.go_on();
    }
    CHECK_EQUAL(first.wait().message, "");
    CHECK_EQUAL(second.wait().message, "");
    CHECK_EQUAL(other.wait().message, "");
    CHECK(got == Floats(1000, 2));
  });
  CHECK(child.finished());
}

TEST(work_on_a_removed_process_set_survives_the_departure_of_its_ranks) {
  const WorldOptions options = world({0, 1});
  auto sockets = connect_all(2);
  Child child(options, sockets, 1, [](TestEngine& engine) {
    const auto id = add_process_set(engine, {0, 1});
    Request barrier(SPARKHVD_BARRIER, "x");
    TestWork work = engine.submit(barrier.on(id).raw());
    Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
    TestWork removed = engine.submit(remove.numbers({id}).raw());
    stop_myself();
    const std::string problem = work.wait().message;
    return problem + removed.wait().message;
  });
  run_others(options, sockets, 1, [&](TestEngine& engine, std::int32_t) {
    const auto id = add_process_set(engine, {0, 1});
    child.wait_until_stopped();
    Request barrier(SPARKHVD_BARRIER, "x");
    CHECK_EQUAL(run(engine, barrier.on(id)).message, "");
    Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
    CHECK_EQUAL(run(engine, remove.numbers({id})).message, "");
    std::jthread later([&] {
      sleep_ms(300);
      child.go_on();
    });
    CHECK_EQUAL(engine.shutdown().code, SPARKHVD_OK);
  });
  CHECK(child.finished());
}

// ---- Join

TEST(a_joined_rank_counts_along_with_the_settings_of_each_operation) {
  for (const auto& hosts :
       {std::vector<std::int32_t>{0, 0, 0}, std::vector<std::int32_t>{0, 0, 1}}) {
    WorldOptions options = world(hosts);
    options.slot_bytes = 64 << 10;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      for (int round = 0; round < 10; ++round) {
        Floats before(300000, 1);
        Floats meanwhile(300000, 1);
        Floats after(300000, 1);
        std::vector<TestWork> works;
        Request first = allreduce_of("before", before);
        works.push_back(engine.submit(first.raw()));
        Request configure(SPARKHVD_CONFIGURE, "configure");
        configure.numbers({round % 2 == 0 ? 4096 : 65536, 0, 0});
        works.push_back(engine.submit(configure.raw()));
        Request second = allreduce_of("meanwhile", meanwhile);
        if (rank != 1) works.push_back(engine.submit(second.raw()));
        Request join(SPARKHVD_JOIN, "join");
        works.push_back(engine.submit(join.raw()));
        for (auto& work : works) CHECK_EQUAL(work.wait().message, "");
        CHECK_EQUAL(sum(engine, "after", after).message, "");
        CHECK(before == Floats(300000, 3));
        CHECK(meanwhile == Floats(300000, rank == 1 ? 1 : 2));
        CHECK(after == Floats(300000, 3));
      }
    });
  }
}

TEST(ranks_join_under_any_name_and_once) {
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    for (int round = 0; round < 3; ++round) {
      Request join(SPARKHVD_JOIN, "end of rank " + std::to_string(rank));
      TestWork work = engine.submit(join.raw());
      Request again(SPARKHVD_JOIN, "again");
      Status status;
      if (rank == 1 && work.poll() == SPARKHVD_PENDING) {
        TestWork second = engine.submit(again.raw(), &status);
        if (status.code == SPARKHVD_OK) {  // the first operation had ended by then
          CHECK_EQUAL(work.wait().message, "");
          CHECK_EQUAL(second.wait().message, "");
          continue;
        }
        CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
      }
      CHECK_EQUAL(work.wait().message, "");
    }
  });
}

TEST(who_joins_owes_nothing_from_before) {
  const TimePoint start{};
  const auto at = [&](double seconds) { return deadline_after(start, seconds); };
  Negotiation negotiation({0, {Rank{0}, Rank{1}}, 0});
  const auto ready = [](const std::string& name, Collective collective = Collective::kAllreduce) {
    Ready message;
    message.name = name;
    message.descriptor.collective = collective;
    message.descriptor.reduce_op = ReduceOp::kSum;
    message.descriptor.timeout_s = 1;
    if (collective == Collective::kAllreduce) message.descriptor.shapes = {{4}};
    return message;
  };
  CHECK(negotiation.ready(Rank{0}, ready("gradient"), start).decisions.empty());
  CHECK(negotiation.tick(at(2)).decisions.size() == 1);  // rank 1 is too late
  CHECK(negotiation.ready(Rank{1}, ready("join", Collective::kJoin), at(3)).decisions.empty());
  CHECK(negotiation.ready(Rank{0}, ready("join", Collective::kJoin), at(3)).decisions.size() == 1);
  // In the next epoch rank 1 must not receive a refusal from the epoch before.
  CHECK(negotiation.ready(Rank{1}, ready("gradient"), at(4)).decisions.empty());
  const auto outcome = negotiation.ready(Rank{0}, ready("gradient"), at(4));
  CHECK(outcome.decisions.size() == 1 &&
        std::holds_alternative<Execute>(outcome.decisions[0].message));
}

// ---- Wrong calls and wrong frames

TEST(a_request_that_fits_no_message_is_refused_and_nothing_else_fails) {
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t) {
    Floats data(1, 1);
    Request huge(SPARKHVD_ALLREDUCE, "huge");
    for (int i = 0; i < 400000; ++i) huge.tensor(data.data(), data.data(), {1});
    Status status;
    engine.submit(huge.raw(), &status);
    CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
    CHECK_MESSAGE(status.message.find("fewer tensors") != std::string::npos, status.message);
    CHECK_EQUAL(sum(engine, "x", data).message, "");
  });
}

namespace {

/// Lets rank 1 receive frames that the test forges in the name of rank 0. `submit` starts the operation that rank 1 has
/// in flight at that time.
Status receive(const std::vector<Bytes>& frames,
               const std::function<TestWork(TestEngine&)>& submit) {
  WorldOptions options = world(one_host(2));
  auto sockets = connect_all(2);
  const int spy = ::fcntl(sockets[0][1], F_DUPFD_CLOEXEC, 0);
  std::atomic<bool> done{false};
  Status status;
  {
    std::jthread other([&] {
      TestEngine engine(options, 0, sockets[0]);
      while (!done) sleep_ms(1);
    });
    TestEngine engine(options, 1, sockets[1]);
    TestWork work = submit(engine);
    sleep_ms(50);
    // Sends all frames in one call, because rank 1 may close the connection after the first invalid frame.
    Bytes all;
    for (const auto& frame : frames) all.insert(all.end(), frame.begin(), frame.end());
    const auto count = ::send(spy, all.data(), all.size(), MSG_NOSIGNAL);
    status = count == static_cast<ssize_t>(all.size()) ? work.wait(3000) : Status{-1, "send"};
    done = true;
  }
  ::close(spy);
  return status;
}

TestWork submit_join(TestEngine& engine) {
  Request join(SPARKHVD_JOIN, "join");
  return engine.submit(join.raw());
}

void check_is_named(const Status& status) {
  CHECK_EQUAL(status.code, SPARKHVD_PEER_LOST);
  CHECK_MESSAGE(status.message.find("rank 0 is lost: it sent") != std::string::npos,
                status.message);
}

}  // namespace

TEST(an_order_with_contributors_that_do_not_exist_names_the_coordinator) {
  Execute order;
  order.name = "x";
  order.contributors = {Rank{77}};
  order.descriptor.emplace();
  order.descriptor->dtype = DType::kFloat32;
  order.descriptor->shapes = {{10000000}};
  check_is_named(receive({encode(order)}, submit_join));
  order.contributors = {Rank{0}, Rank{0}};
  check_is_named(receive({encode(order)}, submit_join));
  order.contributors = {Rank{0}};
  order.descriptor->collective = Collective::kAlltoall;
  check_is_named(receive({encode(order)}, submit_join));
}

TEST(an_order_with_a_place_outside_of_memory_fails_the_operation_at_once) {
  Floats data(10, 1);
  Execute order;
  order.name = "x";
  const Place outside{{0, UINT64_MAX}, std::uint64_t{1} << 40};
  order.places = {outside, outside};
  check_is_named(receive({encode(order)}, [&](TestEngine& engine) {
    Request request = allreduce_of("x", data);
    return engine.submit(request.raw());
  }));
}

TEST(orders_of_a_plan_that_nobody_made_end_the_connection) {
  check_is_named(receive({encode(ExecuteAgain{0, 0, {0}})}, submit_join));
  check_is_named(receive({encode(ReadyAgain{0, {0}})}, submit_join));
  Floats data(10, 1);
  Execute order;
  order.name = "x";
  order.number = 3;
  check_is_named(receive({encode(order)}, [&](TestEngine& engine) {
    Request request = allreduce_of("x", data);
    return engine.submit(request.raw());
  }));
}

TEST(offers_of_memory_that_nobody_asked_for_end_the_connection) {
  std::vector<Bytes> offers;
  std::vector<Bytes> answers;
  for (std::uint64_t i = 0; i < 20; ++i) {
    offers.push_back(encode(SegmentOffer{{0, 1000 + i}, false}));
    answers.push_back(encode(SegmentMapped{{0, 1000 + i}, true}));
  }
  check_is_named(receive(offers, submit_join));
  check_is_named(receive(answers, submit_join));
  check_is_named(receive({encode(SegmentOffer{{7, 0}, false})}, submit_join));
  check_is_named(receive({encode(SegmentMapped{{7, 0}, true})}, submit_join));
}

// ---- Everything at once

TEST(everything_at_once_on_overlapping_process_sets) {
  for (const auto& hosts :
       {std::vector<std::int32_t>{0, 0, 0, 0}, std::vector<std::int32_t>{0, 0, 1, 1},
        std::vector<std::int32_t>{0, 1, 2, 3}, std::vector<std::int32_t>{0, 0, 0, 1}}) {
    for (const std::uint32_t streams : {1U, 3U}) {
      WorldOptions options = world(hosts);
      options.streams = streams;
      options.stall_shutdown_s = 20;
      run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
        const std::vector<Numbers> sets{{0, 1, 2, 3}, {0, 1, 2}, {1, 2, 3}, {0, 3}, {2}};
        std::vector<std::int32_t> ids{0};
        for (std::size_t i = 1; i < sets.size(); ++i) {
          ids.push_back(add_process_set(engine, sets[i]));
        }
        std::mt19937 own(static_cast<unsigned>(rank) + 1);
        for (int round = 0; round < 6; ++round) {
          std::mt19937 shared(static_cast<unsigned>(round) + 7);
          struct Item {
            std::size_t set;
            int kind;
            std::size_t count;
            std::string name;
          };
          std::vector<Item> items;
          for (int i = 0; i < 40; ++i) {
            const std::size_t counts[] = {0, 1, 50, 3000, 40000};
            const auto set = shared() % sets.size();
            const auto kind = static_cast<int>(shared() % 9);
            const auto count = counts[shared() % 5];
            items.push_back({set, kind, count, "op " + std::to_string(i)});
          }
          std::shuffle(items.begin(), items.end(), own);
          std::vector<Floats> inputs;
          std::vector<Floats> outputs;
          std::vector<TestWork> works;
          std::vector<Item> mine;
          for (const auto& item : items) {
            const auto& ranks = sets[item.set];
            if (std::ranges::count(ranks, rank) == 0) continue;
            const std::size_t n = ranks.size();
            const auto rows = static_cast<std::int64_t>(item.count);
            inputs.emplace_back(item.count, static_cast<float>(rank + 1));
            outputs.emplace_back(item.count, -1.0F);
            float* in = inputs.back().data();
            float* out = outputs.back().data();
            const std::int32_t kinds[] = {
                SPARKHVD_ALLREDUCE, SPARKHVD_BROADCAST,     SPARKHVD_ALLGATHER,
                SPARKHVD_ALLTOALL,  SPARKHVD_REDUCESCATTER, SPARKHVD_BARRIER,
                SPARKHVD_REDUCE,    SPARKHVD_GATHER,        SPARKHVD_SCATTER};
            Request request(kinds[item.kind], item.name);
            request.on(ids[item.set]);
            if (item.kind == 3) {
              // Each rank sends all rows to the next rank.
              Numbers splits(n, 0);
              const auto index = std::ranges::find(ranks, rank) - ranks.begin();
              splits[(static_cast<std::size_t>(index) + 1) % n] = rows;
              request.numbers(splits);
            }
            const auto root = static_cast<std::int32_t>(ranks[item.count % n]);
            if (item.kind == 8 && rank == root) {
              Numbers splits(n, 0);  // the root sends all rows to the last rank
              splits.back() = rows;
              request.numbers(splits);
            }
            const bool allocates = item.kind == 2 || item.kind == 3 || item.kind >= 7;
            if (item.kind != 5) {
              request.tensor(in, allocates ? nullptr : out,
                             {item.kind == 8 && rank != root ? 0 : rows});
            }
            request.raw().root_rank = root;
            works.push_back(engine.submit(request.raw()));
            mine.push_back(item);
            if (own() % 5 == 0) works[own() % works.size()].wait(0);
          }
          for (std::size_t i = 0; i < works.size(); ++i) {
            const std::string problem = works[i].wait().message;
            CHECK_EQUAL(problem, "");
            const auto& item = mine[i];
            const auto& ranks = sets[item.set];
            float total = 0;
            for (const auto r : ranks) total += static_cast<float>(r + 1);
            const auto index =
                static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
            const std::size_t n = ranks.size();
            if (item.kind == 0) CHECK(outputs[i] == Floats(item.count, total));
            if (item.kind == 1) {
              CHECK(outputs[i] ==
                    Floats(item.count, static_cast<float>(ranks[item.count % n] + 1)));
            }
            if (item.kind == 2) {
              Floats all;
              for (const auto r : ranks)
                all.insert(all.end(), item.count, static_cast<float>(r + 1));
              CHECK(result_of(works[i]).data == all);
            }
            if (item.kind == 3) {
              CHECK(result_of(works[i]).data ==
                    Floats(item.count, static_cast<float>(ranks[(index + n - 1) % n] + 1)));
            }
            if (item.kind == 4) {
              const std::size_t rows = item.count / n + (index < item.count % n ? 1 : 0);
              CHECK(std::all_of(outputs[i].begin(),
                                outputs[i].begin() + static_cast<std::ptrdiff_t>(rows),
                                [&](float x) { return x == total; }));
            }
            const auto root = ranks[item.count % n];
            if (item.kind == 6) CHECK(outputs[i] == Floats(item.count, rank == root ? total : -1));
            if (item.kind == 7) {
              Floats all;
              for (const auto r : ranks)
                if (rank == root) all.insert(all.end(), item.count, static_cast<float>(r + 1));
              CHECK(result_of(works[i]).data == all);
            }
            if (item.kind == 8) {
              const std::size_t rows = index + 1 == n ? item.count : 0;
              CHECK(result_of(works[i]).data == Floats(rows, static_cast<float>(root + 1)));
            }
          }
          Request join(SPARKHVD_JOIN, "join");
          join.on(ids[1]);
          TestWork joined{nullptr};
          if (rank < 3) joined = engine.submit(join.raw());
          if (rank < 3) CHECK_EQUAL(joined.wait().message, "");
        }
        for (std::size_t i = 1; i < sets.size(); ++i) {
          Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
          CHECK_EQUAL(run(engine, remove.numbers({ids[i]})).message, "");
        }
      });
    }
  }
}

}  // namespace sparkhvd::test::adversity_test
