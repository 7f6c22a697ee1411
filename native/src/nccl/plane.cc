#include "nccl/plane.h"

#include <pthread.h>

#include <algorithm>
#include <map>

#include "nccl/device_collectives.h"
#include "text.h"

namespace sparkhvd::nccl {
namespace {

// A finished operation is noticed at once for so long after something happened ...
constexpr auto kSpinTime = std::chrono::microseconds(100);
// ... and then by looks that become rarer: each costs about 1 us of a CPU.
constexpr auto kShortestSleep = std::chrono::microseconds(20);
constexpr auto kLongestSleep = std::chrono::milliseconds(1);
constexpr auto kAsyncErrorPeriod = std::chrono::milliseconds(100);
// What the leaver has finished can be finished here, soon; then its communicator ends.
constexpr auto kLeaverTime = std::chrono::seconds(1);
// How long the plane's thread has to come out of NCCL before its communicators are aborted under it.
constexpr auto kParkTime = std::chrono::milliseconds(500);

/// The plane is being aborted: out of NCCL.
struct Interrupted {};
/// A rank that the operation needs has left.
struct Condemned {};

std::int32_t status_of(NcclResult result) noexcept {
  switch (result) {
    case NcclResult::kSystemError:
    case NcclResult::kRemoteError:
      return SPARKHVD_PEER_LOST;
    case NcclResult::kInvalidUsage:
      return SPARKHVD_INVALID_ARGUMENT;  // two ranks on one GPU, say
    default:
      return static_cast<int>(result) == 8 ? SPARKHVD_TIMEOUT : SPARKHVD_INTERNAL;  // 2.30
  }
}

}  // namespace

// ---- Requests
// --------------------------------------------------------------------------------------------

bool Requests::push(Request request) {
  const std::scoped_lock lock(mutex_);
  if (is_closed_) return false;
  requests_.push_back(std::move(request));
  changed_.notify_one();
  return true;
}

std::optional<Request> Requests::next(Clock::duration longest) {
  std::unique_lock lock(mutex_);
  const auto has_some = [this] { return is_woken_ || !requests_.empty(); };
  if (longest == Clock::duration::max()) {
    changed_.wait(lock, has_some);
  } else if (longest > Clock::duration::zero()) {
    changed_.wait_for(lock, longest, has_some);
  }
  if (std::exchange(is_woken_, false) || requests_.empty()) return std::nullopt;
  Request request = std::move(requests_.front());
  requests_.pop_front();
  return request;
}

void Requests::wake() {
  const std::scoped_lock lock(mutex_);
  is_woken_ = true;
  changed_.notify_one();
}

std::deque<Request> Requests::close() {
  const std::scoped_lock lock(mutex_);
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
  if (!memory_->is_mine()) return;  // a forked child: the lock may be another process's
  try {
    plane_->push(FreeMemory{memory_});  // a plane that has ended drops it, which frees it here
  } catch (const std::exception&) {     // no memory for the request: freed here
  }
}

// ---- The plane's thread
// ----------------------------------------------------------------------------------

class DevicePlane::Core {
 public:
  Core(std::shared_ptr<Device> the_device, std::function<void()> the_ring)
      : device(std::move(the_device)),
        requests(std::make_shared<Requests>()),
        ring_(std::move(the_ring)) {}

  void run() noexcept;
  void abort_all() noexcept;
  void ask_to_abort();
  void condemn(std::int32_t process_set, std::uint64_t limit);
  /// True once both threads have ended, at the latest at `deadline`.
  bool wait_for_end(TimePoint deadline);
  void forget_ring() {
    const std::scoped_lock lock(mutex_);
    ring_ = nullptr;
  }
  News take_news() {
    const std::scoped_lock lock(mutex_);
    has_news.store(false, std::memory_order_relaxed);
    return std::exchange(news_, {});
  }

  const std::shared_ptr<Device> device;
  const std::shared_ptr<Requests> requests;
  std::atomic<bool> has_news{false};
  std::atomic<const char*> whereabouts{"the GPU"};
  std::atomic<bool> is_aborting{false};

 private:
  struct Communicator {
    ncclComm_t handle = nullptr;
    std::map<const DeviceMemory*, void*> registered;
  };
  struct InFlight {
    std::int32_t process_set = 0;
    std::uint64_t sequence = 0;
    std::shared_ptr<Operation> operation;  // null: this rank has joined
    Event own_event;                       // then
    CUevent done = nullptr;
  };
  struct Condemnation {
    std::uint64_t limit = 0;
    TimePoint deadline{};
  };
  /// What the plane's thread is doing, for messages.
  class Doing {
   public:
    Doing(Core& core, const char* what) : core_(core), before_(core.whereabouts.exchange(what)) {}
    Doing(const Doing&) = delete;
    ~Doing() { core_.whereabouts.store(before_); }

   private:
    Core& core_;
    const char* before_;
  };

  const CudaApi& cuda() const { return device->cuda(); }
  const NcclApi& nccl() const { return device->nccl(); }

  template <class Tell>
  void tell(Tell tell) {
    const std::scoped_lock lock(mutex_);
    tell(news_);
    has_news.store(true, std::memory_order_release);
    if (ring_) ring_();
  }

  void work();
  void park();
  Clock::duration sleep_time();
  void serve(std::unique_ptr<Launch>& request);
  void serve(MakeUniqueId& request);
  void serve(RemoveCommunicator& request);
  void serve(FreeMemory& request);

  Communicator& communicator_of(const Launch& launch);
  void make_communicator(const Launch& launch);
  void run_on_device(const Launch& launch);
  void make_memory(const Launch& launch);
  const Scratch& scratch_of(std::size_t bytes);
  [[noreturn]] void fail(NcclResult result, const char* call, ncclComm_t communicator) const;
  void settle(ncclComm_t communicator, NcclResult result, const char* call, const Launch* launch);
  void pause(Clock::duration longest);

  bool poll_finished();
  void poll_errors();
  void poll_condemned();
  void poll_retired();
  bool is_condemned(std::int32_t process_set, std::uint64_t sequence);
  void end_condemned(std::int32_t process_set);
  void add_live(ncclComm_t communicator);
  void remove_live(ncclComm_t communicator);

  // The plane's thread's.
  std::map<std::int32_t, Communicator> communicators_;
  std::vector<ncclComm_t> retired_;  // of removed process sets: finalized, and then destroyed
  std::deque<InFlight> in_flight_;   // in the order of the stream
  std::vector<std::unique_ptr<DeviceMemory>> scratch_memory_;
  Scratch scratch_;
  std::size_t scratch_bytes_ = 0;
  TimePoint spin_until_{};
  TimePoint next_error_look_{};
  Clock::duration sleep_ = kShortestSleep;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::function<void()> ring_;
  News news_;
  std::vector<ncclComm_t> live_;  // to abort
  std::map<std::int32_t, Condemnation> condemned_;
  bool is_parked_ = false;
  bool is_aborter_running_ = false;

  std::atomic<bool> has_condemned_{false};
};

void DevicePlane::Core::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "sparkhvd-nccl");
  try {
    // For the whole life of this thread: it disturbs nobody's capture of a graph, and none
    // disturbs it.
    CUstreamCaptureMode mode = CUstreamCaptureMode::kRelaxed;
    cuda().check(cuda().cuThreadExchangeStreamCaptureMode(&mode),
                 "cuThreadExchangeStreamCaptureMode");
    cuda().check(cuda().cuCtxSetCurrent(device->context()), "cuCtxSetCurrent");
    work();
  } catch (const Interrupted&) {  // the driver knows why
  } catch (const Error& error) {
    tell([&](News& news) { news.failure = error; });
  } catch (const std::exception& error) {
    tell([&](News& news) { news.failure.emplace(SPARKHVD_INTERNAL, error.what()); });
  }
  park();
}

void DevicePlane::Core::work() {
  while (!is_aborting.load()) {
    if (auto request = requests->next(sleep_time())) {
      std::visit([this](auto& one) { serve(one); }, *request);
      spin_until_ = Clock::now() + kSpinTime;
    }
    if (poll_finished()) spin_until_ = Clock::now() + kSpinTime;
    poll_errors();
    if (has_condemned_.load(std::memory_order_acquire)) poll_condemned();
    poll_retired();
  }
}

/// Nothing of this thread is inside NCCL from here on.
void DevicePlane::Core::park() {
  const std::scoped_lock lock(mutex_);
  is_parked_ = true;
  changed_.notify_all();
}

Clock::duration DevicePlane::Core::sleep_time() {
  const bool waits = !in_flight_.empty() || !retired_.empty();
  if (!waits) {
    sleep_ = kShortestSleep;
    return Clock::duration::max();
  }
  if (Clock::now() < spin_until_) {
    sleep_ = kShortestSleep;
    std::this_thread::yield();
    return Clock::duration::zero();
  }
  return std::exchange(sleep_, std::min<Clock::duration>(2 * sleep_, kLongestSleep));
}

// ---- What is asked for
// -----------------------------------------------------------------------------------

void DevicePlane::Core::serve(MakeUniqueId& request) {
  const Doing doing(*this, "ncclGetUniqueId");
  News::Id made{request.process_set, {}};
  if (const auto result = nccl().ncclGetUniqueId(&made.id); result != NcclResult::kSuccess) {
    fail(result, "ncclGetUniqueId", nullptr);
  }
  tell([&](News& news) { news.ids.push_back(made); });
}

void DevicePlane::Core::serve(RemoveCommunicator& request) {
  const auto entry = communicators_.find(request.process_set);
  if (entry == communicators_.end()) return;
  Communicator communicator = std::move(entry->second);
  communicators_.erase(entry);
  for (const auto& [memory, handle] : communicator.registered) {
    nccl().ncclCommDeregister(communicator.handle, handle);
  }
  const Doing doing(*this, "ncclCommFinalize");
  const auto result = nccl().ncclCommFinalize(communicator.handle);
  // What cannot end in order ends with the plane.
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) {
    retired_.push_back(communicator.handle);
  }
}

void DevicePlane::Core::serve(FreeMemory& request) {
  for (auto& [id, communicator] : communicators_) {
    const auto entry = communicator.registered.find(request.memory.get());
    if (entry == communicator.registered.end()) continue;
    nccl().ncclCommDeregister(communicator.handle, entry->second);
    communicator.registered.erase(entry);
  }
}

void DevicePlane::Core::serve(std::unique_ptr<Launch>& request) {
  const Launch& launch = *request;
  InFlight entry{launch.process_set, launch.sequence, launch.operation, {}, nullptr};
  bool is_condemned_now = is_condemned(launch.process_set, launch.sequence);
  if (!is_condemned_now) {
    try {
      if (launch.unique_id) make_communicator(launch);
      run_on_device(launch);
    } catch (const Condemned&) {
      is_condemned_now = true;
      end_condemned(launch.process_set);
    } catch (const Error& error) {
      // Memory that one rank has not got is its own trouble; everything else is everybody's.
      if (launch.descriptor().collective != Collective::kRegister ||
          error.status() != SPARKHVD_UNSUPPORTED) {
        throw;
      }
      tell([&](News& news) {
        news.done.push_back({launch.process_set, launch.sequence, error.status(), error.what()});
      });
      return;
    }
  }
  if (is_condemned_now) {
    tell([&](News& news) {
      news.done.push_back({launch.process_set, launch.sequence, SPARKHVD_SHUT_DOWN, {}});
    });
    return;
  }
  if (launch.operation) {
    auto& on_device = *launch.operation->on_device;
    on_device.done = Event(device);
    entry.done = on_device.done.get();
  } else {
    entry.own_event = Event(device);
    entry.done = entry.own_event.get();
  }
  cuda().check(cuda().cuEventRecord(entry.done, device->stream()), "cuEventRecord");
  if (in_flight_.empty()) next_error_look_ = Clock::now() + kAsyncErrorPeriod;
  in_flight_.push_back(std::move(entry));
  if (!launch.operation) return;
  launch.operation->on_device->is_launched.store(true, std::memory_order_release);
  tell([](News&) {});  // somebody may wait for just this
}

// ---- Communicators
// ---------------------------------------------------------------------------------------

void DevicePlane::Core::add_live(ncclComm_t communicator) {
  const std::scoped_lock lock(mutex_);
  live_.push_back(communicator);
}

void DevicePlane::Core::remove_live(ncclComm_t communicator) {
  const std::scoped_lock lock(mutex_);
  std::erase(live_, communicator);
}

void DevicePlane::Core::fail(NcclResult result, const char* call, ncclComm_t communicator) const {
  throw Error(status_of(result), nccl().describe(result, call, communicator));
}

/// Everybody in the process set does this at the same place of the one order.
void DevicePlane::Core::make_communicator(const Launch& launch) {
  const Doing doing(*this, "ncclCommInitRankConfig");
  NcclConfig config = non_blocking_config();
  ncclComm_t handle = nullptr;
  const auto result =
      nccl().ncclCommInitRankConfig(&handle, static_cast<int>(launch.ranks.size()),
                                    *launch.unique_id, static_cast<int>(launch.index), &config);
  if (handle != nullptr) {
    add_live(handle);
    communicators_[launch.process_set].handle = handle;
  }
  settle(handle, result, "ncclCommInitRankConfig", &launch);
}

DevicePlane::Core::Communicator& DevicePlane::Core::communicator_of(const Launch& launch) {
  const auto entry = communicators_.find(launch.process_set);
  if (entry != communicators_.end()) return entry->second;
  throw Error(SPARKHVD_INTERNAL, "process set " + std::to_string(launch.process_set) +
                                     " has no communicator, and none was ordered.");
}

/// Waits until the communicator has done what was called, as non-blocking communicators want it before
/// anything else is enqueued.
void DevicePlane::Core::settle(ncclComm_t communicator, NcclResult result, const char* call,
                               const Launch* launch) {
  if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
    fail(result, call, communicator);
  }
  const TimePoint spin_end = Clock::now() + kSpinTime;
  Clock::duration sleep = kShortestSleep;
  while (true) {
    NcclResult state = NcclResult::kSuccess;
    const auto asked = nccl().ncclCommGetAsyncError(communicator, &state);
    if (asked != NcclResult::kSuccess) fail(asked, "ncclCommGetAsyncError", communicator);
    if (state == NcclResult::kSuccess) return;
    if (state != NcclResult::kInProgress) fail(state, call, communicator);
    if (is_aborting.load()) throw Interrupted{};
    if (launch != nullptr && is_condemned(launch->process_set, launch->sequence)) {
      throw Condemned{};
    }
    poll_finished();
    if (Clock::now() < spin_end) {
      std::this_thread::yield();
    } else {
      pause(sleep);
      sleep = std::min<Clock::duration>(2 * sleep, kLongestSleep);
    }
  }
}

/// NCCL has nothing to sleep on; an abort ends it.
void DevicePlane::Core::pause(Clock::duration longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [this] { return is_aborting.load(); });
}

// ---- Operations
// ------------------------------------------------------------------------------------------

void DevicePlane::Core::run_on_device(const Launch& launch) {
  if (launch.descriptor().collective == Collective::kRegister) return make_memory(launch);
  if (!has_work(launch)) return;
  const Communicator& communicator = communicator_of(launch);
  std::span<const OnDevice::Tensor> tensors;
  Scratch scratch;
  if (launch.operation) {
    const OnDevice& on_device = *launch.operation->on_device;
    tensors = on_device.tensors;
    const Doing doing(*this, "cuStreamWaitEvent");
    cuda().check(cuda().cuStreamWaitEvent(device->stream(), on_device.ready.get(), 0),
                 "cuStreamWaitEvent");
  } else {
    scratch = scratch_of(scratch_bytes(launch.descriptor()));
  }
  const char* call = algorithm_of(launch.descriptor().collective);
  const Doing doing(*this, call);
  nccl().check(nccl().ncclGroupStart(), "ncclGroupStart");
  try {
    enqueue(nccl(), communicator.handle, device->stream(), launch, tensors, scratch);
  } catch (...) {
    nccl().ncclGroupEnd();
    throw;
  }
  settle(communicator.handle, nccl().ncclGroupEnd(), "ncclGroupEnd", &launch);
}

void DevicePlane::Core::make_memory(const Launch& launch) {
  const Doing doing(*this, "ncclMemAlloc");
  Communicator& communicator = communicator_of(launch);
  const auto bytes = static_cast<std::size_t>(launch.descriptor().numbers.at(0));
  auto memory = std::make_shared<DeviceMemory>(device, bytes);
  const auto address = reinterpret_cast<CUdeviceptr>(memory->data());
  cuda().check(cuda().cuMemsetD8Async(address, 0, bytes, device->stream()), "cuMemsetD8Async");
  if (memory->can_be_registered() && nccl().ncclCommRegister != nullptr &&
      nccl().ncclCommDeregister != nullptr) {
    void* handle = nullptr;
    const auto result =
        nccl().ncclCommRegister(communicator.handle, memory->data(), bytes, &handle);
    settle(communicator.handle, result, "ncclCommRegister", &launch);
    if (handle != nullptr) communicator.registered.emplace(memory.get(), handle);
  }
  launch.operation->on_device->buffer = std::make_shared<DeviceBuffer>(memory, requests);
}

const Scratch& DevicePlane::Core::scratch_of(std::size_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_;
  // The memory before stays until nothing is in flight: freeing would wait for the device. Twice as
  // much each time, so that there are few.
  scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
  auto zeros = std::make_unique<DeviceMemory>(device, scratch_bytes_);
  auto results = std::make_unique<DeviceMemory>(device, scratch_bytes_);
  cuda().check(cuda().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(zeros->data()), 0,
                                      scratch_bytes_, device->stream()),
               "cuMemsetD8Async");
  scratch_ = {zeros->data(), results->data()};
  scratch_memory_.push_back(std::move(zeros));
  scratch_memory_.push_back(std::move(results));
  return scratch_;
}

// ---- What happens meanwhile
// ------------------------------------------------------------------------------

bool DevicePlane::Core::poll_finished() {
  bool moved = false;
  while (!in_flight_.empty()) {
    const InFlight& first = in_flight_.front();
    const CUresult result = cuda().cuEventQuery(first.done);
    if (result == kCudaErrorNotReady) break;
    cuda().check(result, "cuEventQuery");
    tell([&](News& news) { news.done.push_back({first.process_set, first.sequence}); });
    in_flight_.pop_front();
    moved = true;
  }
  if (in_flight_.empty() && scratch_memory_.size() > 2) {
    scratch_memory_.erase(scratch_memory_.begin(), scratch_memory_.end() - 2);
  }
  return moved;
}

void DevicePlane::Core::poll_errors() {
  if (in_flight_.empty()) return;
  const auto now = Clock::now();
  if (now < next_error_look_) return;
  next_error_look_ = now + kAsyncErrorPeriod;
  for (const auto& [id, communicator] : communicators_) {
    NcclResult state = NcclResult::kSuccess;
    const auto asked = nccl().ncclCommGetAsyncError(communicator.handle, &state);
    if (asked != NcclResult::kSuccess) {
      fail(asked, "ncclCommGetAsyncError", communicator.handle);
    }
    if (state != NcclResult::kSuccess && state != NcclResult::kInProgress) {
      fail(state, "a collective", communicator.handle);
    }
  }
}

void DevicePlane::Core::poll_retired() {
  std::erase_if(retired_, [this](ncclComm_t communicator) {
    NcclResult state = NcclResult::kSuccess;
    const auto asked = nccl().ncclCommGetAsyncError(communicator, &state);
    if (asked == NcclResult::kSuccess && state == NcclResult::kInProgress) return false;
    if (asked == NcclResult::kSuccess && state == NcclResult::kSuccess) {
      remove_live(communicator);
      nccl().ncclCommDestroy(communicator);
    }
    return true;  // with an error it ends with the plane
  });
}

// ---- Ranks that leave
// ------------------------------------------------------------------------------------

void DevicePlane::Core::condemn(std::int32_t process_set, std::uint64_t limit) {
  {
    const std::scoped_lock lock(mutex_);
    const Condemnation given{limit, Clock::now() + kLeaverTime};
    auto [entry, is_new] = condemned_.try_emplace(process_set, given);
    if (!is_new) entry->second.limit = std::min(entry->second.limit, limit);
  }
  has_condemned_.store(true, std::memory_order_release);
  requests->wake();
}

bool DevicePlane::Core::is_condemned(std::int32_t process_set, std::uint64_t sequence) {
  if (!has_condemned_.load(std::memory_order_acquire)) return false;
  const std::scoped_lock lock(mutex_);
  const auto entry = condemned_.find(process_set);
  return entry != condemned_.end() && sequence >= entry->second.limit;
}

/// Communicators that a rank has left, once what it has finished is finished here.
void DevicePlane::Core::poll_condemned() {
  std::map<std::int32_t, Condemnation> condemned;
  {
    const std::scoped_lock lock(mutex_);
    condemned = condemned_;
  }
  for (const auto& [process_set, condemnation] : condemned) {
    const auto entry = communicators_.find(process_set);
    if (entry == communicators_.end()) continue;
    const auto id = process_set;
    const bool has_earlier = std::ranges::any_of(in_flight_, [&](const InFlight& one) {
      return one.process_set == id && one.sequence < condemnation.limit;
    });
    if (!has_earlier || Clock::now() >= condemnation.deadline) end_condemned(id);
  }
}

void DevicePlane::Core::end_condemned(std::int32_t process_set) {
  const auto entry = communicators_.find(process_set);
  if (entry == communicators_.end()) return;
  const Doing doing(*this, "ncclCommAbort");
  const ncclComm_t handle = entry->second.handle;
  communicators_.erase(entry);
  remove_live(handle);
  nccl().ncclCommAbort(handle);
}

// ---- The end
// ---------------------------------------------------------------------------------------------

void DevicePlane::Core::ask_to_abort() {
  {
    const std::scoped_lock lock(mutex_);
    is_aborting.store(true);
    is_aborter_running_ = true;
    changed_.notify_all();
  }
  requests->wake();
}

void DevicePlane::Core::abort_all() noexcept {
  ::pthread_setname_np(::pthread_self(), "sparkhvd-abort");
  const TimePoint deadline = Clock::now() + kAbortTime;
  try {
    std::vector<ncclComm_t> live;
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kParkTime, [this] { return is_parked_; });
      live = std::exchange(live_, {});
    }
    const CurrentContext current(cuda(), device->context());
    const RelaxedCapture relaxed(cuda());
    if (!live.empty()) {
      // In one group: one after the other, each may wait for a kernel of the next.
      nccl().ncclGroupStart();
      for (const ncclComm_t communicator : live) nccl().ncclCommAbort(communicator);
      nccl().ncclGroupEnd();
    }
    // The kernels have been told to end; until they have, they may write.
    while (cuda().cuStreamQuery(device->stream()) == kCudaErrorNotReady &&
           Clock::now() < deadline) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kLongestSleep, [] { return false; });
    }
  } catch (const std::exception&) {  // the driver's deadline ends what is left
  }
  // Memory that callers have let go of is freed here, behind the communicators.
  requests->close().clear();
  tell([](News& news) { news.is_aborted = true; });
  const std::scoped_lock lock(mutex_);
  is_aborter_running_ = false;
  changed_.notify_all();
}

bool DevicePlane::Core::wait_for_end(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return is_parked_ && !is_aborter_running_; });
}

// ---- The driver's side
// -----------------------------------------------------------------------------------

DevicePlane::DevicePlane(std::shared_ptr<Device> device, std::function<void()> ring)
    : core_(std::make_shared<Core>(std::move(device), std::move(ring))),
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

void DevicePlane::condemn(std::int32_t process_set, std::uint64_t limit) {
  core_->condemn(process_set, limit);
}

bool DevicePlane::has_news() const noexcept {
  return core_->has_news.load(std::memory_order_acquire);
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
      thread->detach();  // see Shutdown, above
    }
  }
  return has_ended;
}

}  // namespace sparkhvd::nccl
