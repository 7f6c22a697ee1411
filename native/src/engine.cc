#include "engine.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <future>

#include "collectives/spec.h"
#include "text.h"
#include "transport/tcp.h"

namespace sparkhvd {
namespace {

const Kernels& kernels_or_error(std::int32_t isa) {
  if (!isa_available(isa)) {
    throw Error(SPARKHVD_UNSUPPORTED,
                "instruction set " + std::to_string(isa) +
                    " is not available on this CPU or in this build. Use isa='auto'.");
  }
  return kernels(isa);
}

}  // namespace

Engine::Engine(EngineOptions options)
    : rank_(options.world.rank),
      size_(options.world.hosts.size()),
      kernels_(kernels_or_error(options.isa)),
      spin_(std::chrono::microseconds(options.spin_us)),
      stall_shutdown_s_(options.stall_shutdown_s),
      recorder_(rank_, size_),
      stacks_(options.stack_signal, options.stack_pipe),
      control_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      stall_warning_s_(options.stall_warning_s),
      out_of_memory_(SPARKHVD_INTERNAL,
                     rank_text(rank_) + " is out of memory, and its engine failed."),
      watched_(options.sockets.size()),
      said_goodbye_(size_, false),
      loss_watch_(options.host_loss_s) {
  if (!control_.valid()) throw_errno("eventfd");
  if (!timer_.valid()) throw_errno("timerfd_create");
  for (const auto& socket : options.sockets) {
    if (socket.valid()) tune_tcp(socket.get(), options.host_loss_s);
  }
  std::vector<std::string> warnings;
  world_.emplace(std::move(options.world), std::move(options.sockets), bell_, warnings);
  for (const auto& warning : warnings) warn(warning);
  messages_.emplace(*world_, [this](Operation& operation, std::int32_t status, std::string text) {
    finish(operation, status, std::move(text));
  });
  choose_spinning();
  open_group(std::make_unique<Group>(0, world_->team()));
  groups_.at(0)->communicator.emplace(*world_, 0, world_->team(), world_->memory(),
                                      World::kMemoryOffset);
  announce(world_->team(), 0);
  poller_.add(bell_.fd(), EPOLLIN, kBellKey);
  outer_poller_.add(poller_.fd(), EPOLLIN, kNestedKey);
  outer_poller_.add(control_.get(), EPOLLIN, kControlKey);
  outer_poller_.add(timer_.get(), EPOLLIN, kTimerKey);
  bell_.count(recorder_.activity().wakeups);
  const auto start = [this](auto& link) {
    link.count(recorder_.activity().sockets);
    if (link.is_open()) watch(link);
  };
  std::ranges::for_each(world_->links(), start);
  std::ranges::for_each(world_->data_links(), start);
  // What arrived behind the handshake is already buffered and would not wake the thread.
  bell_.ring_self();
  std::promise<void> held;
  const auto is_held = held.get_future();
  thread_ = std::jthread([this, held = std::move(held)]() mutable {
    const auto life = world_->hold_life();
    held.set_value();
    run_progress_thread();
  });
  is_held.wait();
}

Engine::~Engine() { shutdown(); }

// ---- Calls -----------------------------------------------------------------------------------

void Engine::check() const {
  if (is_forked_copy()) throw created_before_fork();
  const std::scoped_lock lock(mutex_);
  if (failure_) throw *failure_;
}

void Engine::accept(const std::unique_lock<std::mutex>& lock,
                    std::shared_ptr<Operation> operation) {
  [[maybe_unused]] const bool is_held = lock.owns_lock();
  if (failure_) throw Error(failure_->status(), operation->label() + ": " + failure_->what());
  const auto members = members_.find(operation->process_set);
  const bool needs_all = !spec_of(operation->descriptor.collective).is_point_to_point;
  for (const Rank rank : departed_) {
    if (!needs_all) break;
    if (members != members_.end() && std::ranges::count(*members->second, rank) == 0) continue;
    throw Error(SPARKHVD_SHUT_DOWN,
                departure_text(operation->descriptor.collective, operation->name, rank));
  }
  auto& of_this_name = in_flight_[{operation->process_set, operation->name}];
  // What is on the device already needs its name no more: the host may be many steps ahead of a GPU.
  if (of_this_name && !nccl::is_launched(*of_this_name)) {
    throw Error(SPARKHVD_INVALID_ARGUMENT,
                operation->label() +
                    ": an operation of this name is in flight on this rank. Wait for it, or use "
                    "another name.");
  }
  of_this_name = operation;
  recorder_.submitted(*operation);
  inbox_.push_back(std::move(operation));
  if (has_driver_ && driver_sleeps_) bell_.ring_self();
}

void Engine::submit(std::shared_ptr<Operation> operation) {
  std::unique_lock lock(mutex_);
  accept(lock, std::move(operation));
  if (has_driver_) return;
  become_driver(lock);
  lock.unlock();
  try_step(Work::kControl);
  lock.lock();
  stop_driving(lock);
}

std::shared_ptr<const std::vector<Rank>> Engine::members(std::int32_t process_set) const {
  const std::scoped_lock lock(mutex_);
  const auto entry = members_.find(process_set);
  if (entry == members_.end()) {
    throw Error(
        SPARKHVD_INVALID_ARGUMENT,
        "process set " + std::to_string(process_set) +
            " does not exist. Add it on every rank first, and use it before it is removed.");
  }
  if (std::ranges::count(*entry->second, rank_) == 0) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, rank_text(rank_) + " is not in process set " +
                                               std::to_string(process_set) + ", which has " +
                                               rank_list(*entry->second) +
                                               ". Only its ranks may call operations on it.");
  }
  return entry->second;
}

void Engine::abort(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (failure_) return;
  abort_request_ = reason;
  if (has_driver_) {
    if (driver_sleeps_) bell_.ring_self();
    return;
  }
  become_driver(lock);
  lock.unlock();
  try_step(Work::kControl);
  lock.lock();
  stop_driving(lock);
}

void Engine::shutdown() {
  const std::scoped_lock once(shutdown_mutex_);
  std::unique_lock lock(mutex_);
  if (is_shut_down_) return;
  is_stopping_ = true;
  hand_over_.store(true, std::memory_order_relaxed);
  bell_.ring_self();
  changed_.notify_all();
  ++waiters_;
  changed_.wait(lock, [this] { return !has_driver_; });
  --waiters_;
  become_driver(lock);
  const bool is_aborted = abort_request_.has_value();
  lock.unlock();
  // The reason for an abort must not be lost to a shutdown right behind it.
  if (is_aborted) try_step(Work::kControl);
  leave();
  // Nothing may keep the thread from being joined, least of all what has no memory to say so.
  const auto attempt = [this](auto body) noexcept {
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "sparkhvd warning: rank %d, shutting down: %s\n", index_of(rank_),
                   error.what());
    }
  };
  attempt([this] { stop_device(); });
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(control_.get(), &one, sizeof(one));
  thread_.join();
  attempt([this] { recorder_.stop_timeline(); });
  lock.lock();
  has_driver_ = false;
  is_shut_down_ = true;
  changed_.notify_all();
}

/// Leaving must succeed: else the peers see the connections end.
void Engine::leave() noexcept {
  try {
    say_goodbye();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sparkhvd warning: rank %d could not say goodbye: %s\n", index_of(rank_),
                 error.what());
    fail_without_memory();
  }
}

void Engine::after_fork() noexcept {
  // The mutex may be held by a thread that does not exist here: no locks, no epoll_ctl (the epoll
  // instances are shared with the parent), only the copies of the descriptors.
  is_forked_copy_.store(true, std::memory_order_relaxed);
  world_->close_descriptors();
  stacks_.close();
  bell_.close();
  poller_.close();
  outer_poller_.close();
  control_.reset();
  timer_.reset();
}

// ---- Endings ---------------------------------------------------------------------------------

void Engine::finish(Operation& operation, std::int32_t status, std::string message) {
  recorder_.finished(operation, status, message);
  operation.message = std::move(message);
  const std::scoped_lock lock(mutex_);
  const auto entry = in_flight_.find({operation.process_set, operation.name});
  // A later operation may have taken the name.
  if (entry != in_flight_.end() && entry->second.get() == &operation) in_flight_.erase(entry);
  operation.status.store(status, std::memory_order_release);
  if (waiters_ > 0) changed_.notify_all();
}

void Engine::fail_all(std::int32_t status, const std::string& message) {
  // Links first: nothing may be written to a tensor once its operation is finished.
  for (auto& link : world_->data_links()) link.cancel_lent();
  messages_->clear();
  for (auto& [id, group] : groups_) {
    group->running.clear();
    group->submitted.clear();
  }
  // All that is in flight, in any state: no caller may wait for ever.
  std::vector<std::shared_ptr<Operation>> operations;
  {
    const std::scoped_lock lock(mutex_);
    failure_.emplace(status, message);
    for (const auto& [key, operation] : in_flight_) operations.push_back(operation);
    inbox_.clear();
  }
  for (auto& operation : operations) {
    // The device may still write to its tensors: it ends with the communicators.
    if (operation->on_device && operation->on_device->is_with_plane) continue;
    const std::string label = operation->label() + ": ";
    finish(*operation, status, message.starts_with(label) ? message : label + message);
  }
}

void Engine::fail(std::int32_t status, const std::string& message) noexcept {
  if (has_failed_) return;
  has_failed_ = true;
  try {
    fail_and_tell(status, message);
  } catch (const std::exception&) {
    fail_without_memory();
  }
}

void Engine::fail_and_tell(std::int32_t status, const std::string& message) {
  for (auto& [id, group] : groups_) group->negotiation.reset();
  fail_all(status, message);
  abort_device();
  const bool is_abort = status == SPARKHVD_SHUT_DOWN;
  const Bytes frame = encode(Abort{is_abort ? SPARKHVD_PEER_LOST : status, message});
  for (auto& link : world_->links()) {
    if (!link.is_open()) continue;
    link.send(frame);
    part_with(link);
  }
  for (auto& link : world_->data_links()) {
    link.close_write();
    unwatch(link, index_of_link(link));
  }
}

/// The last resort, when failing itself fails: every operation ends without a new byte of memory, and the
/// peers see the connections end.
void Engine::fail_without_memory() noexcept {
  has_failed_ = true;
  // What is closed reads and writes nothing that was lent to it.
  world_->close_descriptors();
  messages_->clear();
  for (auto& [id, group] : groups_) {
    group->running.clear();
    group->submitted.clear();
    group->negotiation.reset();
  }
  try {
    abort_device();
  } catch (const std::exception&) {
    // Its operations end with its deadline.
  }
  const std::scoped_lock lock(mutex_);
  if (!failure_) failure_.emplace(std::move(out_of_memory_));
  std::erase_if(in_flight_, [this](const auto& entry) {
    Operation& operation = *entry.second;
    if (operation.on_device && operation.on_device->is_with_plane) return false;
    end_without_memory(operation);
    return true;
  });
  inbox_.clear();
  changed_.notify_all();
}

void Engine::end_without_memory(Operation& operation) noexcept {
  operation.status.store(failure_->status(), std::memory_order_release);
}

void Engine::warn(const std::string& text) const {
  std::fprintf(stderr, "sparkhvd warning: %s\n", text.c_str());
}

Error created_before_fork() {
  return {SPARKHVD_SHUT_DOWN,
          "this engine was created before fork and does not work in the forked child. Start an "
          "engine of "
          "its own in the child, or use it in the parent only."};
}

std::string Operation::label() const { return operation_label(descriptor.collective, name); }

}  // namespace sparkhvd
