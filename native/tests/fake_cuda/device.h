// The simulated GPUs of a process: contexts, streams that are real queues, events, captures.
//
// Threads: each stream has a thread that its first item starts. The thread is detached, because a stream may hang
// forever, as on a GPU. Callers' threads only queue items.
// Ownership: by shared_ptr; the Driver's tables hold a pointer for each handle of the program. Each class has its own
// mutex, and calls no other class while it holds the mutex.
// Shutdown: there is no shutdown. Global objects are never destroyed, because a thread may outlive main.
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
  using Position = std::uint64_t;  // number of items that were submitted up to this item

  /// Queues `item`. It starts when all earlier items have ended.
  Position submit(std::function<void()> item);
  /// Queues a wait for the items of `other` up to `position`.
  void submit_wait(const std::shared_ptr<Stream>& other, Position position);
  Position position();
  bool has_reached(Position position);
  void wait(Position position);
  /// Starts no further item for this time.
  void hold(std::chrono::microseconds duration);
  /// Lets the thread end when the queue is empty.
  void close();

  bool syncs_with_legacy = false;          // created without the flag NON_BLOCKING
  std::atomic<int> unconfirmed = 0;        // launches that NCCL has not reported as done
  std::atomic<bool> is_capturing = false;  // true: items are dropped
  std::atomic<bool> is_spoilt = false;     // the capture is invalid

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

/// An event: a position in a stream. An event that was never recorded counts as reached.
struct Event {
  std::mutex mutex;
  std::shared_ptr<Stream> stream;
  Stream::Position position = 0;
};

/// A simulated GPU. It runs one collective at a time, so communicators that are used in different orders on two ranks
/// deadlock. Of the ready collectives the first launched collective begins.
class Device {
 public:
  explicit Device(int index);

  /// Returns the number of a launch among the device's launches. Call it when a collective is launched.
  std::uint64_t launch();
  /// Takes the device for the launch `ticket` of the operation `key`. Meanwhile only other ranks' launches of the same
  /// operation may run on the device. False if `stop` became true first.
  bool acquire(std::uint64_t ticket, std::uint64_t key, const std::function<bool()>& stop);
  void release();
  /// Records the end of a launch, also if it never took the device.
  void retire();
  /// Waits for the end of every launch so far, as cudaFree does on a GPU.
  void wait_for_launches();

  /// All streams of the device that still exist.
  std::vector<std::shared_ptr<Stream>> streams();
  std::shared_ptr<Stream> add_stream(bool syncs_with_legacy);

  const int index;  // among the machine's devices, ignoring CUDA_VISIBLE_DEVICES
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
  bool can_be_registered = false;  // true for memory from ncclMemAlloc
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
  // A null handle means the legacy stream of the current device.
  std::shared_ptr<Stream> find_stream(const void* handle);
  /// The device of a stream; null for an unknown stream.
  Device* device_of(const std::shared_ptr<Stream>& stream);

  void* add_event();
  bool remove_event(const void* handle);
  void* add_stream(Device& device, bool syncs_with_legacy);
  bool remove_stream(const void* handle);

  /// Success, or CUDA's error for an unsafe call while a graph is captured. Such a call invalidates the capture.
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

/// State of the calling thread. A context is a Device, because each device has only its primary context.
struct ThreadState {
  std::vector<Device*> contexts;
  CUstreamCaptureMode capture_mode = CUstreamCaptureMode::kGlobal;
  bool is_in_host_function = false;
  bool is_wait_skipped = false;  // the cuStreamWaitEvent that is being called
};
ThreadState& this_thread();

/// The device of the thread's current context, or null.
Device* current_device();

/// Submits with the semantics of the legacy stream: it waits for the streams that sync with it, and they wait for it.
/// Records a misuse if NCCL has not confirmed a launch on one of these streams.
Stream::Position submit(const std::shared_ptr<Stream>& stream, std::function<void()> item);

/// Records a misuse if the stream has a launch that NCCL has not confirmed.
void check_confirmed(Stream& stream, const char* function);

}  // namespace fake
