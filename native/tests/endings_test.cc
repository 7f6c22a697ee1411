// Abrupt ends: a process that is killed, a lack of memory while an engine fails, and invalid options.
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <latch>
#include <new>

#include "test.h"
#include "world.h"

namespace {

// Number of the allocation of this thread that will fail, counted from now; 0: no allocation fails.
thread_local int allocations_left = 0;

void* allocate(std::size_t bytes) {
  if (allocations_left > 0 && --allocations_left == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace sparkhvd::test::endings_test {
namespace {

constexpr int kMostAllocations = 24;

struct Tensor {
  Tensor() { request.tensor(data.data(), data.data(), {4}); }
  std::vector<float> data = std::vector<float>(4, 1.0F);
  Request request{SPARKHVD_ALLREDUCE, "x"};
};

/// Waits through the C interface while the `nth` allocation fails. Returns PENDING after 10 s.
std::int32_t wait_without_memory(TestWork& work, int nth) {
  allocations_left = nth;
  const auto status = sparkhvd_wait(work.get(), 10000, nullptr, 0);
  allocations_left = 0;
  return status;
}

TEST(a_failure_without_memory_ends_every_operation) {
  for (int nth = 1; nth < kMostAllocations; ++nth) {
    WorldOptions options;
    options.hosts = one_host(2);
    std::promise<void> submitted;
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      if (rank == 1) {
        submitted.get_future().wait_for(std::chrono::seconds(20));
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return engine.abort("of the test");
      }
      Tensor tensor;
      TestWork work = engine.submit(tensor.request.raw());
      submitted.set_value();
      CHECK(wait_without_memory(work, nth) > SPARKHVD_PENDING);
      Status later;
      engine.submit(tensor.request.raw(), &later);
      CHECK(later.code > SPARKHVD_PENDING);
    });
  }
}

std::chrono::nanoseconds cpu_time() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

TEST(an_engine_that_has_failed_rests) {
  for (const bool use_tcp : {false, true}) {
    WorldOptions options;
    options.hosts = use_tcp ? std::vector<std::int32_t>{0, 1} : one_host(2);
    options.use_tcp = use_tcp;
    std::latch both_have_results(2);
    run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
      Tensor tensor;
      const Status status = engine.submit(tensor.request.raw()).wait();
      both_have_results.arrive_and_wait();
      CHECK_EQUAL(status.message, "");
      if (rank == 0) engine.abort("of the test");
      // Longer than the time until the engine next looks for lost hosts.
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      const auto before = cpu_time();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      CHECK(cpu_time() - before < std::chrono::milliseconds(40));
    });
  }
}

/// A rank in a process that the test can kill. Its connections stay open until this object is destroyed.
class Doomed {
 public:
  Doomed(const WorldOptions& options, const std::vector<std::vector<std::int32_t>>& sockets)
      : kept_(sockets[1]), pid_(::fork()) {
    if (pid_ == 0) {
      close_all(sockets[0]);
      TestEngine engine(options, 1, sockets[1]);
      Tensor tensor;
      engine.submit(tensor.request.raw()).wait();
      while (true) ::pause();
    }
  }
  Doomed(const Doomed&) = delete;
  ~Doomed() {
    kill();
    close_all(kept_);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  std::vector<std::int32_t> kept_;
  pid_t pid_;
};

/// Runs `rank_0(engine, kill)` on rank 0. `kill` kills rank 1.
void with_a_doomed_rank(
    const std::function<void(TestEngine&, const std::function<void()>&)>& rank_0) {
  WorldOptions options;
  options.hosts = one_host(2);
  auto sockets = connect_all(2);
  Doomed doomed(options, sockets);
  TestEngine engine(options, 0, sockets[0]);
  CHECK_EQUAL(engine.created().message, "");
  Tensor tensor;
  CHECK_EQUAL(engine.submit(tensor.request.raw()).wait().message, "");
  rank_0(engine, [&] { doomed.kill(); });
}

TEST(a_killed_process_is_seen_before_its_connection_closes) {
  with_a_doomed_rank([](TestEngine& engine, const auto& kill) {
    Tensor tensor;
    TestWork work = engine.submit(tensor.request.raw());
    CHECK_EQUAL(work.wait(50).code, SPARKHVD_PENDING);
    kill();
    const Status status = work.wait(5000);
    CHECK_EQUAL(status.code, SPARKHVD_PEER_LOST);
    CHECK_MESSAGE(status.message.find("rank 1 is lost: its connection closed without a goodbye") !=
                      std::string::npos,
                  status.message);
  });
}

TEST(a_killed_process_is_seen_by_who_waits_for_nothing) {
  with_a_doomed_rank([](TestEngine& engine, const auto& kill) {
    Tensor tensor;
    TestWork work = engine.submit(tensor.request.raw());
    kill();
    for (int ms = 0; ms < 5000 && work.poll() == SPARKHVD_PENDING; ++ms) ::usleep(1000);
    CHECK_EQUAL(work.poll(), SPARKHVD_PEER_LOST);
  });
}

/// Runs rank 1: it stops after an allreduce, and when it continues it detects that rank 0 has left.
int stop_and_go_on(const WorldOptions& options, const std::vector<std::int32_t>& sockets) {
  TestEngine engine(options, 1, sockets);
  Tensor tensor;
  if (engine.submit(tensor.request.raw()).wait().code != SPARKHVD_OK) return 2;
  ::raise(SIGSTOP);
  Status status;
  TestWork work = engine.submit(tensor.request.raw(), &status);
  if (status.code == SPARKHVD_OK) status = work.wait();
  const bool is_told = status.message.find("rank 0 shut down") != std::string::npos;
  return status.code == SPARKHVD_SHUT_DOWN && is_told ? 0 : 1;
}

TEST(a_rank_that_leaves_waits_for_no_stopped_peer_which_hears_of_it_later) {
  for (const bool is_tcp : {false, true}) {
    WorldOptions options;
    options.hosts = is_tcp ? std::vector<std::int32_t>{0, 1} : one_host(2);
    const auto sockets = connect_all(2, [&](std::size_t, std::size_t) { return is_tcp; });
    const pid_t child = ::fork();
    if (child == 0) {
      close_all(sockets[0]);
      ::_exit(stop_and_go_on(options, sockets[1]));
    }
    close_all(sockets[1]);
    TestEngine engine(options, 0, sockets[0]);
    Tensor tensor;
    CHECK_EQUAL(engine.submit(tensor.request.raw()).wait().message, "");
    int status = 0;
    CHECK(::waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    const auto start = std::chrono::steady_clock::now();
    engine.shutdown();
    engine.destroy();
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(500));
    ::kill(child, SIGCONT);
    CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
  }
}

TEST(an_impossible_number_of_streams_is_refused_before_their_sockets_are_read) {
  const auto sockets = connect_all(2);
  const std::int32_t hosts[] = {0, 0};
  sparkhvd_engine_options options{};
  options.struct_size = sizeof(options);
  options.size = 2;
  options.hosts = hosts;
  options.sockets = sockets[0].data();
  options.streams = UINT32_MAX;
  const std::int32_t one_socket[] = {-1};
  options.stream_sockets = one_socket;
  sparkhvd_engine* engine = nullptr;
  char text[1024] = "";
  CHECK_EQUAL(sparkhvd_engine_create(&options, &engine, text, sizeof(text)),
              SPARKHVD_INVALID_ARGUMENT);
  CHECK_EQUAL(std::string(text), "streams must be from 1 to 64.");
  close_all(sockets[1]);
  close_all({sockets[0].begin() + 2, sockets[0].end()});
}

}  // namespace
}  // namespace sparkhvd::test::endings_test
