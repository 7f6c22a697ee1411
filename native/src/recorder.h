// Records an engine's activity: counters that are always on, and a timeline on request.
//
// **Threads.** Operations are recorded by the thread that drives the engine. Sleeps may be counted
// by any thread; any thread may read the counters, and start and stop the timeline.
//
// **Ownership.** Counters are separate atomics: each number that a reader gets is right, but two numbers may differ by
// one operation. `mutex_` guards the timeline, and is locked only while a timeline runs.
//
// **Shutdown.** `stop_timeline` and the destructor write the queued events.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "counter.h"
#include "operation.h"
#include "sync.h"
#include "timeline.h"
#include "types.h"

namespace sparkhvd {

/// Counters that do not belong to single operations.
struct Activity {
  Counter waits;           // sleeps of callers that waited for an operation
  Counter spins;           // spins that succeeded
  Counter failed_spins;    // spins that ended in sleep
  Counter wakeups;         // wakeups that this rank sent to sleeping peers of its host
  Traffic sockets;         // sent_bytes, received_bytes
  Counter shared_bytes;    // bytes of this rank's tensors in operations through shared memory
  Counter stall_warnings;  // operations that this rank, as coordinator, has warned about
};

class Recorder {
 public:
  Recorder(Rank rank, std::size_t size) : rank_(rank), size_(size), since_(Clock::now()) {}
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The stages of an operation, in this order; `submitted` and `finished` are called once each. `submitted` is called
  // under the lock of submissions, the other functions by the driver.
  void submitted(Operation& operation);
  void agreed(Operation& operation) { operation.trace.agreed = Clock::now(); }
  void started(Operation& operation) { operation.trace.started = Clock::now(); }
  void finished(const Operation& operation, std::int32_t status, const std::string& message);
  /// Records, on the coordinator, that `rank` has submitted an operation.
  void arrived(std::int32_t process_set, const std::string& name, Rank rank);
  /// Records that a thread begins to drive.
  void woke();

  Activity& activity() noexcept { return activity_; }

  /// Ends a running timeline and starts another. Throws INVALID_ARGUMENT if the file cannot be created.
  void start_timeline(const std::string& path, bool mark_cycles);
  /// Returns when the file is complete. Has no effect without a timeline.
  void stop_timeline();

  /// All counters as one JSON object.
  std::string json() const;

 private:
  /// Operations of one collective and algorithm.
  struct Entry {
    Collective collective{};
    const char* algorithm = "";
    Counter operations;   // operations that succeeded
    Counter failures;     // operations that ended with an error
    Counter bytes;        // bytes of this rank's tensors
    Counter negotiation;  // ns from submission to agreement
    Counter queue;        // ns from agreement to start
    Counter run;          // ns from start to end
    Counter longest;      // the most ns from submission to end
    // [i]: operations that took from 2^(i-1) us to less than 2^i us, from submission to end.
    std::array<Counter, 26> histogram;
  };
  static constexpr std::size_t kMaxEntries = 64;

  Entry& entry_of(const Operation& operation);
  void add(TimelineEvent event);
  static TimelineEvent event_of(const Operation& operation, TimelineEvent::Kind kind);
  static void append(std::string& out, const Entry& entry);

  const Rank rank_;
  const std::size_t size_;
  const TimePoint since_;
  Activity activity_;
  Counter in_flight_submitted_;
  Counter in_flight_finished_;
  std::array<Entry, kMaxEntries> entries_;
  // Entries below this index have a collective and an algorithm, which never change.
  std::atomic<std::size_t> num_entries_{0};

  std::atomic<bool> has_timeline_{false};
  mutable Mutex mutex_;
  std::unique_ptr<Timeline> timeline_ GUARDED_BY(mutex_);
};

}  // namespace sparkhvd
