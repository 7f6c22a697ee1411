// The work of the plane's thread, and its end. See plane.h for threads and ownership.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "nccl/device_collectives.h"
#include "nccl/plane.h"

namespace sparkhvd::nccl {

// NCCL and CUDA events cannot wake a thread, so the thread polls. Its sleep between polls grows from the first of these
// times to the second.
inline constexpr auto kShortestSleep = std::chrono::microseconds(20);
inline constexpr auto kLongestSleep = std::chrono::milliseconds(1);
// Largest number of launched operations that the GPU has not finished. At this number the plane launches the next
// operation only when an operation has finished. CUDA's own queue of launches has about this size, and blocks a thread
// when it is full.
inline constexpr std::size_t kMaxInFlight = 1024;
inline constexpr auto kAsyncErrorPeriod = std::chrono::milliseconds(100);

class DevicePlane::Core {
 public:
  Core(std::shared_ptr<Device> the_device, std::function<void()> the_ring, bool awaits_next)
      : device(std::move(the_device)),
        requests(std::make_shared<Requests>()),
        awaits_next_(awaits_next),
        ring_(std::move(the_ring)) {}

  void run() noexcept;
  void abort_all() noexcept;
  void ask_to_abort();
  void mark_for_abort(std::int32_t process_set, std::uint64_t limit);
  /// Waits until both threads have ended. False if they have not ended at `deadline`.
  bool wait_for_end(TimePoint deadline);
  void forget_ring() {
    const Lock lock(mutex_);
    ring_ = nullptr;
  }
  News take_news() {
    const Lock lock(mutex_);
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
    bool is_broken = false;  // it has lost a peer; the driver decides how its operations end
    std::map<const DeviceMemory*, void*> registered;
  };
  struct InFlight {
    std::int32_t process_set = 0;
    std::uint64_t sequence = 0;
    std::shared_ptr<Operation> operation;  // null: this rank has joined
    Event own_event;                       // `done` of a rank that has joined
    CUevent done = nullptr;
    bool is_lost = false;  // its communicator was aborted before the operation finished
  };
  struct AbortMark {
    std::uint64_t limit = 0;
    TimePoint deadline{};
  };
  /// Sets `whereabouts`, the current activity of the plane's thread, for a scope.
  class Doing {
   public:
    Doing(Core& core, const char* what) : core_(core), before_(core.whereabouts.exchange(what)) {}
    Doing(const Doing&) = delete;
    ~Doing() { core_.whereabouts.store(before_); }

   private:
    Core& core_;
    const char* before_;
  };

  /// Thrown when the plane is being aborted, so that its thread leaves NCCL.
  struct Interrupted {};

  const CudaApi& cuda() const { return device->cuda(); }
  const NcclApi& nccl() const { return device->nccl(); }

  template <class Tell>
  void tell(Tell tell) {
    const Lock lock(mutex_);
    tell(news_);
    has_news.store(true, std::memory_order_seq_cst);  // seq_cst: see WakeupEvent
    if (ring_) ring_();
  }

  void work();
  void park();
  /// Throws Interrupted if the plane is being aborted. Call it after every call that may block, before the next use of
  /// a communicator: the aborting thread waits only a short time for this thread, and then destroys communicators.
  void check_abort() const {
    if (is_aborting.load()) throw Interrupted{};
  }
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
  bool is_sound(std::int32_t process_set, Communicator& communicator);
  void break_communicator(std::int32_t process_set, const Error& error);
  void poll_marked();
  void poll_retired();
  bool is_marked_for_abort(std::int32_t process_set, std::uint64_t sequence);
  bool has_earlier(std::int32_t process_set, std::uint64_t limit) const;
  bool has_marked_communicator(std::int32_t process_set) const {
    return communicators_.contains(process_set);
  }
  void end_marked(std::int32_t process_set);
  void end_without_result(const InFlight& operation);
  void add_live(ncclComm_t communicator);
  /// Removes a communicator from `live_`. False if it now belongs to the aborting thread.
  bool remove_live(ncclComm_t communicator);

  // Only the plane's thread uses these.
  const bool awaits_next_;
  std::map<std::int32_t, Communicator> communicators_;
  std::vector<ncclComm_t> retired_;  // communicators of removed sets, until they are finalized
  std::deque<InFlight> in_flight_;   // operations on the stream, in its order
  std::vector<InFlight> stuck_;      // operations of broken communicators, not on the stream
  std::vector<std::unique_ptr<DeviceMemory>> scratch_memory_;
  Scratch scratch_;
  std::size_t scratch_bytes_ = 0;
  TimePoint spin_until_{};
  TimePoint next_error_look_{};
  Clock::duration sleep_ = kShortestSleep;

  Mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> ring_ GUARDED_BY(mutex_);
  News news_ GUARDED_BY(mutex_);
  std::vector<ncclComm_t> live_ GUARDED_BY(mutex_);  // communicators that an abort must end
  std::map<std::int32_t, AbortMark> marked_ GUARDED_BY(mutex_);
  bool is_parked_ GUARDED_BY(mutex_) = false;
  bool is_aborter_running_ GUARDED_BY(mutex_) = false;
  // True after the aborting thread has taken `live_`. The plane's thread then aborts later communicators itself.
  bool is_live_taken_ GUARDED_BY(mutex_) = false;

  std::atomic<bool> has_marked_{false};
};

}  // namespace sparkhvd::nccl
