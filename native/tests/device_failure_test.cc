// Failures of devices and NCCL, ranks that leave or die, and memory that outlives its engine: every operation ends
// soon, and with a reason. Ranks are threads, and the device is the stand-in of tests/fake_cuda.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "device_world.h"

namespace sparkhvd::test::device_failure_test {
namespace {

using Seconds = std::chrono::duration<double>;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return Seconds(std::chrono::steady_clock::now() - start).count();
}

// Results for fake_cuda_fail: ncclUnhandledCudaError and ncclRemoteError.
constexpr int kUnhandledCudaError = 1;
constexpr int kRemoteError = 6;

bool has(const Status& status, const std::string& text) {
  return status.message.find(text) != std::string::npos;
}

class DeviceBuffer {
 public:
  DeviceBuffer(TestEngine& engine, Gpu& gpu, std::int64_t bytes, const std::string& name) {
    Request request(SPARKHVD_REGISTER, name);
    TestWork work = engine.submit(gpu.use(request.numbers({bytes})));
    const Status status = work.wait();
    CHECK_EQUAL(status.message, "");
    char text[1024] = "";
    CHECK_MESSAGE(sparkhvd_work_buffer(work.get(), &buffer_, text, sizeof(text)) == SPARKHVD_OK,
                  text);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { release(); }
  void release() { sparkhvd_buffer_release(std::exchange(buffer_, nullptr)); }
  std::byte* data() { return static_cast<std::byte*>(sparkhvd_buffer_data(buffer_)); }
  sparkhvd_buffer* get() { return buffer_; }

 private:
  sparkhvd_buffer* buffer_ = nullptr;
};

}  // namespace

TEST(a_communicator_that_cannot_be_made_fails_the_engine_with_ncclss_words) {
  FakeScope fake;
  Fake::get().fail("ncclCommInitRankConfig", 1, kUnhandledCudaError);
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(3, 1));
    const Status status = sum.start(engine, "x").wait();
    CHECK_EQUAL(status.code, SPARKHVD_INTERNAL);
    CHECK_MESSAGE(has(status, "ncclCommInitRankConfig failed"), status.message);
    CHECK_MESSAGE(has(status, "NCCL on rank "), status.message);
  });
  fake.check();
}

TEST(an_asynchronous_error_of_nccl_fails_the_engine_on_every_rank) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum first(gpu, Floats(3, 1));
    CHECK_EQUAL(first.start(engine, "first").wait().message, "");
    Request barrier(SPARKHVD_BARRIER, "before");
    CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
    if (rank == 0) Fake::get().fail("ncclAllReduce@stream", 1, kRemoteError);
    Request armed(SPARKHVD_BARRIER, "armed");
    CHECK_EQUAL(engine.submit(armed.raw()).wait().message, "");
    const auto start = std::chrono::steady_clock::now();
    // The operation that fails on one rank may have succeeded on the other rank.
    Sum sum(gpu, Floats(3, 1));
    Status status;
    for (int i = 0; status.code == SPARKHVD_OK && seconds_since(start) < 5; ++i) {
      std::optional<TestWork> work(sum.start(engine, std::to_string(i), 0, &status));
      if (status.code == SPARKHVD_OK) status = work->wait();
    }
    CHECK_MESSAGE(status.code == SPARKHVD_PEER_LOST, status.message);
    CHECK_MESSAGE(has(status, "NCCL on rank "), status.message);
    CHECK(seconds_since(start) < 5);
  });
  fake.check();
}

TEST(a_call_that_hangs_ends_with_the_operations_timeout) {
  for (const char* function : {"ncclCommInitRankConfig", "ncclGetUniqueId", "ncclAllReduce"}) {
    FakeScope fake;
    Fake::get().hang(function, 1);
    std::atomic<int> num_ended{0};
    std::atomic<int> num_left{0};
    run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      const auto start = std::chrono::steady_clock::now();
      Sum sum(gpu, Floats(3, 1));
      Request request(SPARKHVD_ALLREDUCE, "x");
      request.tensor(sum.memory, sum.memory, {3}).raw().timeout_s = 1;
      TestWork work = engine.submit(gpu.use(request));
      const Status status = work.wait();
      CHECK_MESSAGE(status.code == SPARKHVD_TIMEOUT, status.message);
      CHECK_MESSAGE(has(status, "waited"), status.message);
      CHECK(seconds_since(start) < 6);
      // The rank that hangs in NCCL may still launch the operation. Only one of the ranks hangs.
      num_left += work.is_left_to_device();
      // Ends the hang before the engine is destroyed, so that no thread is left behind.
      ++num_ended;
      while (num_ended < 2) std::this_thread::yield();
      if (rank == 0) Fake::get().reset();
    });
    const bool is_launched = std::string(function) != "ncclGetUniqueId";
    CHECK_EQUAL(num_left.load(), is_launched ? 1 : 0);
  }
}

TEST(a_call_that_comes_back_after_the_abort_touches_no_communicator) {
  for (const char* function : {"ncclGroupEnd", "cuStreamWaitEvent", "ncclMemAlloc"}) {
    FakeScope fake;
    std::atomic<int> num_ended{0};
    run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      Sum sum(gpu, Floats(3, 1));
      CHECK_EQUAL(sum.start(engine, "before").wait().message, "");
      Request armed(SPARKHVD_BARRIER, "armed");
      if (rank == 0) Fake::get().hang(function, 1);
      CHECK_EQUAL(engine.submit(armed.raw()).wait().message, "");
      const bool registers = std::string(function) == "ncclMemAlloc";
      Request request(registers ? SPARKHVD_REGISTER : SPARKHVD_ALLREDUCE, "x");
      if (registers) {
        request.numbers({64});
      } else {
        request.tensor(sum.memory, sum.memory, {3});
      }
      request.raw().timeout_s = 1;
      const Status status = engine.submit(gpu.use(request)).wait();
      CHECK_MESSAGE(status.code == SPARKHVD_TIMEOUT || registers, status.message);
      ++num_ended;
      while (num_ended < 2) std::this_thread::yield();
      if (rank == 0) Fake::get().reset();
    });
    CHECK_EQUAL(std::string(function) + ": " + Fake::get().misuse(), std::string(function) + ": ");
  }
}

TEST(a_device_that_hangs_ends_with_the_operations_timeout) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(3, 1));
    if (rank == 0) Fake::get().hang("ncclAllReduce@stream", 1);
    Request armed(SPARKHVD_BARRIER, "armed");
    CHECK_EQUAL(engine.submit(armed.raw()).wait().message, "");
    Request request(SPARKHVD_ALLREDUCE, "x");
    request.tensor(sum.memory, sum.memory, {3}).raw().timeout_s = 1;
    const auto start = std::chrono::steady_clock::now();
    TestWork work = engine.submit(gpu.use(request));
    const Status status = work.wait();
    CHECK_MESSAGE(status.code == SPARKHVD_TIMEOUT, status.message);
    CHECK_MESSAGE(has(status, "for the GPU"), status.message);
    CHECK(seconds_since(start) < 6);
    CHECK(!work.is_left_to_device());  // the abort has ended the kernel
  });
}

TEST(shutdown_ends_operations_that_are_on_the_device) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(1000, 1));
    if (rank == 1) {
      // This rank's part hangs, so the other rank is in the middle of the operation.
      Fake::get().hang("ncclAllReduce@stream", 1);
    }
    TestWork work = sum.start(engine, "x");
    if (rank == 0) {
      const Status status = work.wait();
      CHECK_EQUAL(status.code, SPARKHVD_SHUT_DOWN);
      CHECK_MESSAGE(has(status, "rank 1 shut down"), status.message);
      return;
    }
    CHECK_EQUAL(gpu.wait_stream(work).message, "");
    const auto start = std::chrono::steady_clock::now();
    CHECK_EQUAL(engine.shutdown().message, "");
    CHECK(seconds_since(start) < 5);
    const Status status = work.wait();
    CHECK_EQUAL(status.code, SPARKHVD_SHUT_DOWN);
  });
}

TEST(operations_that_a_departing_rank_does_not_launch_end_on_the_others) {
  FakeScope fake;
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    const auto pair = add_process_set(engine, {0, 1});
    Sum first(gpu, Floats(10, 1));
    CHECK_EQUAL(first.start(engine, "first").wait().message, "");
    CHECK(first.result() == Floats(10, 3));
    if (rank == 2) {
      CHECK_EQUAL(engine.shutdown().message, "");
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    Sum second(gpu, Floats(10, 1));
    Status submitted;
    TestWork work = second.start(engine, "second", 0, &submitted);
    const Status status = submitted.code == SPARKHVD_OK ? work.wait() : submitted;
    CHECK_EQUAL(status.code, SPARKHVD_SHUT_DOWN);
    CHECK_MESSAGE(has(status, "rank 2 shut down before it"), status.message);
    CHECK(seconds_since(start) < 5);
    // The set without the departing rank continues.
    for (int i = 0; i < 5; ++i) {
      Sum third(gpu, Floats(10, 1));
      CHECK_EQUAL(third.start(engine, "third", pair).wait().message, "");
      CHECK(third.result() == Floats(10, 2));
    }
  });
  fake.check();
}

TEST(a_coordinator_may_leave_while_rank_0_passes_its_order_on) {
  for (int round = 0; round < 12; ++round) {
    FakeScope fake;
    run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
      Gpu gpu(engine, rank);
      const auto set = add_process_set(engine, {1, 2});
      const auto others = add_process_set(engine, {0, 2});
      const auto start = std::chrono::steady_clock::now();
      Sum sum(gpu, Floats(10, static_cast<float>(rank)));
      if (rank == 1) {
        TestWork work = sum.start(engine, "last", set);
        std::this_thread::sleep_for(std::chrono::microseconds(100 * (round % 6)));
        CHECK_EQUAL(engine.shutdown().message, "");
        return;
      }
      if (rank == 2) {
        Status submitted;
        TestWork work = sum.start(engine, "last", set, &submitted);
        const Status status = submitted.code == SPARKHVD_OK ? work.wait() : submitted;
        if (status.code == SPARKHVD_OK) {
          CHECK(sum.result() == Floats(10, 3));
        } else {
          CHECK_EQUAL(status.code, SPARKHVD_SHUT_DOWN);
          CHECK_MESSAGE(has(status, "rank 1 shut down"), status.message);
        }
      }
      CHECK(seconds_since(start) < 5);
      Sum after(gpu, Floats(10, 1));
      CHECK_EQUAL(after.start(engine, "after", others).wait().message, "");
      CHECK(after.result() == Floats(10, 2));
    });
    fake.check();
  }
}

TEST(without_rank_0_nothing_is_ordered_on_devices_any_more) {
  FakeScope fake;
  run_ranks(world(one_host(3)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    const auto pair = add_process_set(engine, {1, 2});
    if (rank == 0) {
      CHECK_EQUAL(engine.shutdown().message, "");
      return;
    }
    // When an operation of all ranks is refused, the goodbye of rank 0 has arrived.
    Request barrier(SPARKHVD_BARRIER, "all");
    Status submitted;
    TestWork all = engine.submit(barrier.raw(), &submitted);
    if (submitted.code == SPARKHVD_OK) CHECK_EQUAL(all.wait().code, SPARKHVD_SHUT_DOWN);
    Sum sum(gpu, Floats(10, 1));
    const Status status = sum.start(engine, "x", pair).wait();
    CHECK_EQUAL(status.code, SPARKHVD_SHUT_DOWN);
    CHECK_MESSAGE(has(status, "rank 0 shut down"), status.message);
    Floats data(10, 1);
    Request on_cpu(SPARKHVD_ALLREDUCE, "cpu");
    on_cpu.tensor(data.data(), data.data(), {10}).on(pair);
    CHECK_EQUAL(engine.submit(on_cpu.raw()).wait().message, "");
    CHECK(data == Floats(10, 2));
  });
  fake.check();
}

TEST(a_process_set_that_is_removed_takes_the_trouble_of_its_communicator_along) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    const auto set = add_process_set(engine, {0, 1});
    Sum sum(gpu, Floats(3, 1));
    CHECK_EQUAL(sum.start(engine, "all").wait().message, "");
    CHECK_EQUAL(sum.start(engine, "some", set).wait().message, "");
    const auto meet = [&](const std::string& name) {
      Request barrier(SPARKHVD_BARRIER, name);
      CHECK_EQUAL(engine.submit(barrier.raw()).wait().message, "");
    };
    meet("done");
    if (rank == 0) Fake::get().hang("ncclAllReduce@stream", 1);
    meet("held");
    TestWork held = sum.start(engine, "held");
    CHECK_EQUAL(gpu.wait_stream(held).message, "");
    meet("launched");
    if (rank == 0) {
      // While an operation is on the device, the plane queries all communicators ten times a second: first the
      // communicator of all ranks, then the set's.
      const char* look = "ncclCommGetAsyncError@0";
      const auto wait_for_looks = [&](int before, int number) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (Fake::get().count(look) < before + number) {
          CHECK(std::chrono::steady_clock::now() < deadline);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      };
      wait_for_looks(Fake::get().count(look), 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // between two rounds
      const int before = Fake::get().count(look);
      Fake::get().fail(look, 2, kRemoteError);
      wait_for_looks(before, 2);
    }
    Request remove(SPARKHVD_REMOVE_PROCESS_SET, "remove");
    CHECK_EQUAL(engine.submit(remove.numbers({set}).raw()).wait().message, "");
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1300));  // longer than the engine waits for the cause
    meet("later");
    if (rank == 0) Fake::get().reset();
    CHECK_EQUAL(held.wait().message, "");
  });
  fake.check();
}

TEST(memory_of_the_device_is_reduced_in_place_and_freed_whenever) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    auto kept = std::make_unique<DeviceBuffer>(engine, gpu, 4000, "kept");
    DeviceBuffer freed(engine, gpu, 4000, "freed");
    CHECK_EQUAL(sparkhvd_buffer_device(kept->get()), rank);
    CHECK_EQUAL(sparkhvd_buffer_bytes(kept->get()), 4000U);
    Floats values(1000);
    gpu.read(values.data(), kept->data(), 4000);
    gpu.synchronize();
    CHECK(values == Floats(1000, 0));
    const Floats ones(1000, static_cast<float>(rank + 1));
    gpu.write(kept->data(), ones.data(), 4000);
    Request request(SPARKHVD_ALLREDUCE, "x");
    request.tensor(kept->data(), kept->data(), {1000});
    TestWork work = engine.submit(gpu.use(request));
    CHECK_EQUAL(gpu.wait_stream(work).message, "");
    gpu.read(values.data(), kept->data(), 4000);
    gpu.synchronize();
    CHECK(values == Floats(1000, 3));
    CHECK_EQUAL(work.wait().message, "");
    freed.release();
    CHECK_EQUAL(engine.shutdown().message, "");
    engine.destroy();
    gpu.read(values.data(), kept->data(), 4000);
    gpu.synchronize();
    CHECK(values == Floats(1000, 3));
    kept.reset();
  });
  fake.check();
  CHECK_EQUAL(Fake::get().count("ncclMemAlloc"), Fake::get().count("ncclMemFree"));
}

TEST(an_abort_ends_operations_on_the_device_with_its_reason) {
  FakeScope fake;
  run_ranks(world(one_host(2)), [&](TestEngine& engine, std::int32_t rank) {
    Gpu gpu(engine, rank);
    Sum sum(gpu, Floats(1000, 1));
    if (rank == 1) Fake::get().hang("ncclAllReduce@stream", 1);
    TestWork work = sum.start(engine, "x");
    if (rank == 1) {
      CHECK_EQUAL(gpu.wait_stream(work).message, "");
      engine.abort("enough");
    }
    const auto start = std::chrono::steady_clock::now();
    const Status status = work.wait();
    CHECK_MESSAGE(has(status, "enough"), status.message);
    CHECK(seconds_since(start) < 5);
  });
}

}  // namespace sparkhvd::test::device_failure_test
