// The pretended GPUs of a process: contexts, streams that are real queues, events, captures.
//
// Threads: each stream has one, started by its first item and detached, because a stream may hang
// for good, as on a GPU. Callers' threads only queue.
// Ownership: holders of a shared_ptr; the Driver's tables hold one for each handle that the
// program has. Each class guards itself by its own mutex and calls no other class under it.
// Shutdown: none. Nothing global is destroyed, so a thread that outlives main finds what it needs.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "nccl/cuda_api.h"

namespace fake {

using sparkhvd::nccl::CUresult;
using sparkhvd::nccl::CUstreamCaptureMode;
using sparkhvd::nccl::CUstreamCaptureStatus;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Position = std::uint64_t;  // items submitted before and up to this one

  /// Queues `item`; what was queued before ends before it starts.
  Position submit(std::function<void()> item);
  /// Queues a wait for what `other` has been given so far.
  void submit_wait(const std::shared_ptr<Stream>& other, Position position);
  Position position();
  bool has_reached(Position position);
  void wait(Position position);
  /// Nothing new starts for a while.
  void hold(std::chrono::microseconds duration);
  /// The thread ends once the queue is empty.
  void close();

  bool syncs_with_legacy = false;          // created without the flag NON_BLOCKING
  std::atomic<int> unconfirmed = 0;        // launches that NCCL has not reported as done
  std::atomic<bool> is_capturing = false;  // then items are dropped
  std::atomic<bool> is_spoilt = false;     // the capture

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> items_;
  Position submitted_ = 0;
  Position completed_ = 0;
  std::chrono::steady_clock::time_point held_until_{};
  bool is_running_ = false;
  bool is_closed_ = false;
};

/// An event remembers a place in a stream; unrecorded, it is reached at once.
struct Event {
  std::mutex mutex;
  std::shared_ptr<Stream> stream;
  Stream::Position position = 0;
};

/// One GPU. It runs one collective at a time: communicators that are used in different orders on
/// two ranks deadlock. Of those that are ready, the one launched first begins.
class Device {
 public:
  explicit Device(int index);

  /// To be called when a collective is launched; its place among the device's.
  std::uint64_t launch();
  /// Takes the device for the launch `ticket` of the operation `key`, beside which only the same
  /// operation of another rank may run. False where `stop` said so first.
  bool acquire(std::uint64_t ticket, std::uint64_t key, const std::function<bool()>& stop);
  void release();
  /// The launch has ended, whether it took the device or not.
  void retire();
  /// Waits for the end of every launch so far, as cudaFree does on a GPU.
  void wait_for_launches();

  /// Every stream of the device; those that are gone are left out.
  std::vector<std::shared_ptr<Stream>> streams();
  std::shared_ptr<Stream> add_stream(bool syncs_with_legacy);

  const int index;  // of the machine's, so before CUDA_VISIBLE_DEVICES
  const sparkhvd::nccl::CUuuid uuid;
  const std::shared_ptr<Stream> legacy;
  std::atomic<int> retained = 0;  // the primary context exists while this is positive

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Stream>> streams_;
  std::set<std::uint64_t> ready_;
  std::uint64_t tickets_ = 0;
  std::uint64_t unfinished_ = 0;
  std::uint64_t holder_ = 0;
  int num_holders_ = 0;
};

struct Allocation {
  Device* device = nullptr;
  std::size_t bytes = 0;
  bool can_be_registered = false;  // from ncclMemAlloc
};

class Driver {
 public:
  Driver();

  std::vector<std::unique_ptr<Device>> devices;  // by ordinal
  std::atomic<bool> is_initialized = false;

  std::uint64_t allocate(Device& device, std::size_t bytes, bool can_be_registered);
  bool free(std::uint64_t address);
  /// The allocation that [address, address + bytes) lies in.
  std::optional<Allocation> find(std::uint64_t address, std::size_t bytes = 1);

  std::shared_ptr<Event> find_event(const void* handle);
  std::shared_ptr<Stream> find_stream(const void* handle);  // null of the current device's legacy
  /// The device whose stream it is; null for an unknown stream.
  Device* device_of(const std::shared_ptr<Stream>& stream);

  void* add_event();
  bool remove_event(const void* handle);
  void* add_stream(Device& device, bool syncs_with_legacy);
  bool remove_stream(const void* handle);

  /// Success, or how CUDA refuses an unsafe call while a graph is captured, which it spoils.
  CUresult check_capture();
  CUresult begin_capture(const void* handle);
  CUresult end_capture(const void* handle);

 private:
  std::mutex mutex_;  // guards the tables
  std::map<const void*, std::shared_ptr<Event>> events_;
  std::map<const void*, std::shared_ptr<Stream>> streams_;
  std::map<std::uint64_t, Allocation> memory_;
  std::map<Stream*, std::thread::id> captures_;
};

Driver& driver();

/// Of the calling thread: contexts are Devices, because each has only the primary one.
struct ThreadState {
  std::vector<Device*> contexts;
  CUstreamCaptureMode capture_mode = CUstreamCaptureMode::kGlobal;
  bool is_in_host_function = false;
  bool is_wait_skipped = false;  // the cuStreamWaitEvent that is being called
};
ThreadState& this_thread();

/// The device of the thread's current context, or null.
Device* current_device();

/// Submits with the semantics of the legacy stream: it waits for the streams that sync with it, and
/// they for it. Records a misuse where NCCL still has to confirm a launch there.
Stream::Position submit(const std::shared_ptr<Stream>& stream, std::function<void()> item);

/// Records a misuse where work goes to a stream that has a launch which NCCL has not confirmed.
void check_confirmed(Stream& stream, const char* function);

}  // namespace fake
