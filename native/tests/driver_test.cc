// The driver with a fake in place of an engine: only one thread drives at a time, no request is lost, and no wait is
// endless.
#include "engine/driver.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "test.h"

namespace sparkhvd::test::driver_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

/// A request that the fake serves `rounds` rounds after the driver has taken it.
struct Job {
  explicit Job(int the_rounds) : rounds(the_rounds) {}
  int rounds;
  std::atomic<bool> is_served{false};
};

/// Serves jobs, and checks that only one thread at a time drives it.
class Fake final : public Drivable {
 public:
  explicit Fake(WakeupEvent& wakeup) : wakeup_(wakeup) { poller_.add(wakeup_.fd(), EPOLLIN, 0); }

  int fd() const { return poller_.fd(); }
  void on_served(std::function<void()> notify) { notify_ = std::move(notify); }
  void submit(Job& job) {
    const std::scoped_lock lock(mutex_);
    submitted_.push_back(&job);
  }
  void run_for_ever(bool is_running) { is_running_ = is_running; }
  bool had_two_drivers() const { return had_two_drivers_; }
  std::size_t steps() const { return steps_; }

  bool step(Work) noexcept override {
    const Alone alone(*this);
    ++steps_;
    bool moved = take();
    for (auto job = taken_.begin(); job != taken_.end();) {
      moved = true;
      if (--(*job)->rounds > 0) {
        ++job;
        continue;
      }
      (*job)->is_served = true;
      job = taken_.erase(job);
      notify_();
    }
    return moved;
  }
  void look() noexcept override { const Alone alone(*this); }
  bool sleep(TimePoint deadline, bool& interrupted) noexcept override {
    const Alone alone(*this);
    const bool moved = !poller_.wait(milliseconds_until(deadline), interrupted).empty();
    if (moved) wakeup_.clear();
    return moved;
  }
  bool is_running() const override { return is_running_; }
  bool expects_bell() const override { return true; }
  TimePoint wake_up() const override { return kNever; }
  bool has_requests() const override {
    const std::scoped_lock lock(mutex_);
    return !submitted_.empty();
  }
  bool is_idle() const override { return !has_requests(); }

 private:
  class Alone {
   public:
    explicit Alone(Fake& fake) : fake_(fake) {
      if (fake_.inside_++ != 0) fake_.had_two_drivers_ = true;
    }
    ~Alone() { --fake_.inside_; }

   private:
    Fake& fake_;
  };

  bool take() {
    const std::scoped_lock lock(mutex_);
    taken_.insert(taken_.end(), submitted_.begin(), submitted_.end());
    const bool has_some = !submitted_.empty();
    submitted_.clear();
    return has_some;
  }

  WakeupEvent& wakeup_;
  Poller poller_;
  std::function<void()> notify_;
  mutable std::mutex mutex_;
  std::vector<Job*> submitted_;
  std::deque<Job*> taken_;  // only the driver's thread uses it
  std::atomic<bool> is_running_{false};
  std::atomic<int> inside_{0};
  std::atomic<bool> had_two_drivers_{false};
  std::atomic<std::size_t> steps_{0};
};

class Served final : public WaitCondition {
 public:
  explicit Served(const Job& job) : job_(job) {}
  bool is_reached() const override { return job_.is_served; }

 private:
  const Job& job_;
};

/// A driver with its fake engine and its progress thread.
struct World {
  explicit World(microseconds spin = microseconds(50))
      : fake(wakeup), driver({}, fake, wakeup, recorder, fake.fd(), {spin, false, 100}) {
    fake.on_served([this] { driver.notify(); });
    thread = std::jthread([this] { driver.run_progress_thread(); });
  }
  ~World() {
    driver.take_for_good();
    driver.wake_progress_thread();
    thread.join();
    driver.release();
  }
  /// Submits a job and waits as the driver. True if the job was served in time.
  bool run(Job& job, milliseconds patience = milliseconds(20000)) {
    fake.submit(job);
    driver.wait(Served(job), Clock::now() + patience, true);
    return job.is_served;
  }
  /// Submits a job without driving, so that another thread serves it. True if the job was served in time.
  bool serve(Job& job) {
    fake.submit(job);
    driver.serve();
    const TimePoint end = Clock::now() + milliseconds(20000);
    while (!job.is_served && Clock::now() < end) std::this_thread::sleep_for(microseconds(100));
    return job.is_served;
  }

  WakeupEvent wakeup;
  Recorder recorder{Rank{0}, 1};
  Fake fake;
  Driver driver;
  std::jthread thread;
};

TEST(driver_is_one_thread_and_forgets_no_request) {
  for (const auto spin : {microseconds(0), microseconds(50)}) {
    World world(spin);
    std::atomic<int> unserved{0};
    {
      std::vector<std::jthread> callers;
      for (unsigned i = 0; i < 5; ++i) {
        callers.emplace_back([&, i] {
          std::mt19937 random(i + static_cast<unsigned>(spin.count()));
          for (int round = 0; round < 300; ++round) {
            Job job(static_cast<int>(random() % 5) + 1);
            const bool ok = random() % 3 == 0 ? world.serve(job) : world.run(job);
            if (!ok) ++unserved;
            if (random() % 8 == 0) std::this_thread::sleep_for(microseconds(random() % 400));
          }
        });
      }
    }
    CHECK_EQUAL(unserved.load(), 0);
    CHECK(!world.fake.had_two_drivers());
  }
}

TEST(driver_of_nobody_is_the_progress_thread) {
  World world;
  // The job needs more rounds than the submission itself drives.
  for (int i = 0; i < 20; ++i) {
    Job job(3);
    CHECK(world.serve(job));
  }
}

TEST(driver_that_sleeps_is_woken_for_a_request) {
  World world(microseconds(0));
  Job never(1 << 30);
  std::jthread sleeper([&] {
    Job waited(1);
    world.run(waited);
    // This job is never submitted, so the thread sleeps as the driver.
    world.driver.wait(Served(never), Clock::now() + milliseconds(300), false);
  });
  std::this_thread::sleep_for(milliseconds(50));
  for (int i = 0; i < 20; ++i) {
    Job job(1);
    const TimePoint start = Clock::now();
    CHECK(world.run(job));
    CHECK(Clock::now() - start < milliseconds(5000));
  }
}

TEST(driver_waits_no_longer_than_its_deadline) {
  World world;
  Job never(1 << 30);
  for (const bool is_running : {false, true}) {
    world.fake.run_for_ever(is_running);
    const TimePoint start = Clock::now();
    world.driver.wait(Served(never), start + milliseconds(30), false);
    CHECK(Clock::now() - start >= milliseconds(30));
    CHECK(!never.is_served);
  }
}

TEST(driver_taken_for_good_ends_every_wait) {
  WakeupEvent wakeup;
  Recorder recorder{Rank{0}, 1};
  Fake fake(wakeup);
  Driver driver({}, fake, wakeup, recorder, fake.fd(), {microseconds(50), false, 100});
  fake.on_served([&] { driver.notify(); });
  std::jthread progress([&] { driver.run_progress_thread(); });
  Job never(1 << 30);
  std::vector<std::jthread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&] { driver.wait(Served(never), kNever, false); });
  }
  std::this_thread::sleep_for(milliseconds(20));
  driver.take_for_good();
  const std::size_t steps = fake.steps();
  driver.wake_progress_thread();
  progress.join();
  driver.release();
  waiters.clear();
  CHECK_EQUAL(fake.steps(), steps);
  CHECK(!fake.had_two_drivers());
}

TEST(driver_rests_when_nothing_happens) {
  World world;
  Job job(3);
  CHECK(world.serve(job));
  std::this_thread::sleep_for(milliseconds(50));
  const std::size_t before = world.fake.steps();
  std::this_thread::sleep_for(milliseconds(100));
  CHECK(world.fake.steps() - before < 20);
}

}  // namespace
}  // namespace sparkhvd::test::driver_test
