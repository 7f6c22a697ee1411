#include "nccl/plane.h"

#include "nccl/plane_core.h"

namespace sparkhvd::nccl {

// ---- Requests --------------------------------------------------------------------------------

bool Requests::push(Request request) {
  const Lock lock(mutex_);
  if (is_closed_) return false;
  requests_.push_back(std::move(request));
  has_some_.store(true, std::memory_order_release);
  changed_.notify_one();
  return true;
}

std::optional<Request> Requests::next(Clock::duration longest) {
  // Checks the flag first, so that frequent polling does not take the lock from writers.
  if (longest == Clock::duration::zero() && !has_some_.load(std::memory_order_acquire)) {
    return std::nullopt;
  }
  const TimePoint deadline = longest == Clock::duration::max() ? kNever : Clock::now() + longest;
  Lock lock(mutex_);
  while (!is_woken_ && requests_.empty() && Clock::now() < deadline) lock.wait(changed_, deadline);
  if (std::exchange(is_woken_, false) || requests_.empty()) return std::nullopt;
  has_some_.store(requests_.size() > 1, std::memory_order_relaxed);
  Request request = std::move(requests_.front());
  requests_.pop_front();
  return request;
}

void Requests::wake() {
  const Lock lock(mutex_);
  is_woken_ = true;
  has_some_.store(true, std::memory_order_release);
  changed_.notify_one();
}

std::deque<Request> Requests::close() {
  const Lock lock(mutex_);
  is_closed_ = true;
  return std::exchange(requests_, {});
}

bool OnDevice::let_wait(std::uint64_t stream, const std::string& label) const {
  if (!is_launched.load(std::memory_order_acquire)) return false;
  const auto handle = reinterpret_cast<CUstream>(stream);
  const CurrentContext current(device->cuda(), device->context());
  device->refuse_capture(handle, label);
  device->cuda().check(device->cuda().cuStreamWaitEvent(handle, done.get(), 0),
                       "cuStreamWaitEvent");
  return true;
}

DeviceBuffer::~DeviceBuffer() {
  if (!memory_->is_mine()) return;  // in a forked child, where the lock may be held forever
  try {
    plane_->push(FreeMemory{memory_});  // a plane that has ended drops the request; then freed here
  } catch (const std::exception&) {     // no memory for the request; then freed here
  }
}

// ---- The driver's side -----------------------------------------------------------------------

DevicePlane::DevicePlane(std::shared_ptr<Device> device, std::function<void()> ring,
                         bool awaits_next)
    : core_(std::make_shared<Core>(std::move(device), std::move(ring), awaits_next)),
      thread_([core = core_] { core->run(); }) {}

DevicePlane::~DevicePlane() {
  if (!thread_.joinable() && !aborter_.joinable()) return;
  abort();
  stop(Clock::now() + kAbortTime);
}

const std::shared_ptr<Device>& DevicePlane::device() const noexcept { return core_->device; }

void DevicePlane::launch(Launch launch) {
  core_->requests->push(std::make_unique<Launch>(std::move(launch)));
}

void DevicePlane::make_unique_id(std::int32_t process_set) {
  core_->requests->push(MakeUniqueId{process_set});
}

void DevicePlane::remove(std::int32_t process_set) {
  core_->requests->push(RemoveCommunicator{process_set});
}

void DevicePlane::mark_for_abort(std::int32_t process_set, std::uint64_t limit) {
  core_->mark_for_abort(process_set, limit);
}

bool DevicePlane::has_news() const noexcept {
  return core_->has_news.load(std::memory_order_seq_cst);  // seq_cst: see WakeupEvent
}

News DevicePlane::take_news() { return core_->take_news(); }

const char* DevicePlane::whereabouts() const noexcept { return core_->whereabouts.load(); }

void DevicePlane::abort() {
  if (core_->is_aborting.load()) return;
  core_->ask_to_abort();
  aborter_ = std::thread([core = core_] { core->abort_all(); });
}

bool DevicePlane::stop(TimePoint deadline) {
  const bool has_ended = core_->wait_for_end(deadline);
  core_->forget_ring();
  for (std::thread* thread : {&thread_, &aborter_}) {
    if (!thread->joinable()) continue;
    if (has_ended) {
      thread->join();
    } else {
      thread->detach();  // see Shutdown in plane.h
    }
  }
  return has_ended;
}

}  // namespace sparkhvd::nccl
