#include "engine/engine.h"

#include <cstdio>
#include <future>
#include <utility>

#include "engine/wait_conditions.h"
#include "text.h"

namespace sparkhvd {
Engine::Engine(EngineOptions options) : Engine(std::move(options), Driver::Descriptors()) {}

Engine::Engine(EngineOptions options, Driver::Descriptors descriptors)
    : stall_shutdown_s_(options.stall_shutdown_s),
      core_(std::move(options), [this] { driver_.notify(); }),
      driver_(std::move(descriptors), core_, core_.wakeup(), core_.recorder(), core_.connections(),
              core_.spinning()) {
  std::promise<void> held;
  const auto is_held = held.get_future();
  thread_ = std::jthread([this, held = std::move(held)]() mutable {
    const auto life = core_.world().hold_life();
    held.set_value();
    driver_.run_progress_thread();
  });
  is_held.wait();
}

Engine::~Engine() { shutdown(); }

void Engine::check() const {
  if (is_forked_copy()) throw created_before_fork();
  core_.in_flight().check();
}

void Engine::open_device(const nccl::DeviceOptions& options) {
  if (is_forked_copy()) throw created_before_fork();
  core_.devices().open(options);
}

void Engine::submit(std::shared_ptr<Operation> operation) {
  core_.in_flight().submit(std::move(operation));
  driver_.serve();
}

void Engine::wait(const Operation& operation, TimePoint deadline) {
  if (!operation.is_finished()) driver_.wait(Ended(operation), deadline, false);
}

void Engine::wait_launched(const Operation& operation, TimePoint deadline) {
  const Launched launched(operation, core_.devices().has_cpu_for_plane());
  if (!launched.is_reached()) driver_.wait(launched, deadline, false);
}

void Engine::run(const std::shared_ptr<Operation>& operation, TimePoint deadline) {
  core_.in_flight().submit(operation);
  driver_.wait(Ended(*operation), deadline, true);
}

void Engine::abort(const std::string& reason) {
  if (core_.in_flight().request_abort(reason)) driver_.serve();
}

void Engine::shutdown() {
  const Lock once(shutdown_mutex_);
  if (is_shut_down_) return;
  driver_.take_for_good();
  // Sends a requested abort now, because otherwise the shutdown could hide its reason from the peers.
  if (core_.in_flight().is_abort_requested()) core_.step(Work::kControl);
  core_.leave();
  // No exception may prevent the join of the thread, even if memory is exhausted.
  const auto attempt = [this](auto body) noexcept {
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "sparkhvd warning: rank %d, shutting down: %s\n", index_of(rank()),
                   error.what());
    }
  };
  attempt([this] { core_.devices().stop(); });
  driver_.wake_progress_thread();
  if (thread_.joinable()) thread_.join();
  attempt([this] { core_.recorder().stop_timeline(); });
  driver_.release();
  is_shut_down_ = true;
}

void Engine::after_fork() noexcept {
  // Only closes the child's copies of the descriptors. A mutex may be held by a thread that does not exist in the
  // child, and epoll_ctl would change the epoll instances of the parent.
  is_forked_copy_.store(true, std::memory_order_relaxed);
  core_.after_fork();
  driver_.after_fork();
}

Error created_before_fork() {
  return {SPARKHVD_SHUT_DOWN,
          "this engine was created before fork and does not work in the forked child. Start an "
          "engine of its own in the child, or use it in the parent only."};
}

}  // namespace sparkhvd
