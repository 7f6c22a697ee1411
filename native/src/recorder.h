// Observation of an engine: counters that are always on, and a timeline on request.
//
// **Threads.** Operations are recorded by the thread that drives the engine. Sleeps may be counted
// by any thread; any thread may read the counters, and start and stop the timeline.
//
// **Ownership.** Counters are separate atomics: each number that a reader gets is right, and together they
// are at most one operation apart. `mutex_` guards the timeline, and is locked only during a timeline.
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

/// Counters besides those of operations, with their names in `Recorder::json`.
struct Activity {
  Counter waits;           // a caller slept for an operation
  Counter spins;           // spins that succeeded
  Counter failed_spins;    // spins that ended in sleep
  Counter wakeups;         // rings of a sleeping peer of this host
  Traffic sockets;         // sent_bytes, received_bytes
  Counter shared_bytes;    // of this rank's tensors in operations through shared memory
  Counter stall_warnings;  // operations that this rank, as coordinator, has warned about
};

class Recorder {
 public:
  Recorder(Rank rank, std::size_t size) : rank_(rank), size_(size), since_(Clock::now()) {}
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The stages of an operation, in this order; `submitted` and `finished` once each. The first is
  // called under the lock of submissions, the others by the driver.
  void submitted(Operation& operation);
  void agreed(Operation& operation) { operation.trace.agreed = Clock::now(); }
  void started(Operation& operation) { operation.trace.started = Clock::now(); }
  void finished(const Operation& operation, std::int32_t status, const std::string& message);
  /// On the coordinator: `rank` has submitted an operation.
  void arrived(std::int32_t process_set, const std::string& name, Rank rank);
  /// A driver begins to work.
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
    Counter operations;   // ended well
    Counter failures;     // ended with an error
    Counter bytes;        // of this rank's tensors
    Counter negotiation;  // ns from submission to agreement ...
    Counter queue;        // ... to its turn ...
    Counter run;          // ... to its end
    Counter longest;      // ns from submission to end
    // [i]: operations that took less than 2^i us from submission to end, and no less than half that.
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
  std::atomic<std::size_t> num_entries_{0};  // entries before it are named and never renamed

  std::atomic<bool> has_timeline_{false};
  mutable Mutex mutex_;
  std::unique_ptr<Timeline> timeline_ GUARDED_BY(mutex_);
};

}  // namespace sparkhvd
