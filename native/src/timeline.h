// The timeline of one rank in Chrome's trace event format. Its file is valid JSON at any time (see trace_file.h).
//
// **Threads.** Any thread adds events, which costs a short lock and never waits for the disk. A
// background thread, alive as long as the Timeline, converts them to text in batches.
//
// **Ownership.** `mutex_` guards the queue. Only the background thread, called the writer, uses the file and the lanes.
//
// **Shutdown.** The destructor writes the queued events, joins the thread and closes the file. After a write
// error the writer prints one warning and drops later events; the file then ends after the last whole event.
//
// **Picture.** A viewer shows one process per rank and one lane ("thread") per operation name, so the same tensor is
// always in the same row. A name that is in flight twice gets a second lane. Generated names with digits at the end
// ("noname.17") share lanes. Each operation is one slice from submission to end. It contains Horovod's slices
// "NEGOTIATE_ALLREDUCE" and "ALLREDUCE"; the latter contains "queue" and the algorithm. Small marks on the
// coordinator's lane show the arrival of each rank.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "clock.h"
#include "sync.h"
#include "trace.h"
#include "trace_file.h"
#include "types.h"

namespace sparkhvd {

struct TimelineEvent {
  enum class Kind : std::uint8_t {
    kSubmitted,  // name, process_set, collective, dtype, is_on_device, bytes; trace.submitted
    kArrived,    // name, process_set, rank, at: when the coordinator received the submission
    kFinished,   // the fields of kSubmitted, the whole trace, status, message; at: the end
    kMark,       // name, at: a moment outside of operations
  };
  Kind kind{};
  std::string name;
  std::int32_t process_set = 0;
  Collective collective{};
  DType dtype{};
  bool is_on_device = false;
  std::uint64_t bytes = 0;
  OperationTrace trace;
  Rank rank{};
  TimePoint at{};
  std::int32_t status = 0;
  std::string message;
};

class Timeline {
 public:
  struct Options {
    std::string path;
    Rank rank{};
    std::size_t size = 1;
    bool mark_cycles = false;
    std::size_t max_queued = 1 << 15;  // events; about 10 MB
    std::function<void(const std::string&)> warn;
  };
  struct Statistics {
    std::uint64_t written = 0;  // events of the queue that are in the file
    std::uint64_t dropped = 0;  // events lost because the disk was too slow, or full
  };

  /// Creates or empties the file. Throws INVALID_ARGUMENT with the path if this fails.
  explicit Timeline(Options options);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  const std::string& path() const noexcept { return options_.path; }
  bool marks_cycles() const noexcept { return options_.mark_cycles; }
  /// Queues an event without waiting for the disk. Drops the event if `max_queued` events wait.
  void add(TimelineEvent event);
  Statistics statistics() const;

 private:
  /// A row of the picture. A lane without an owner is free for a new operation.
  struct Lane {
    bool has_owner = false;
    bool is_open = false;  // its current slice has begun and has not ended
    bool is_on_device = false;
    std::int64_t submitted = 0;
    std::int64_t begin = 0;
    std::int64_t free_from = INT64_MIN;  // ns; slices of one lane must not overlap
  };
  using Key = std::pair<std::int32_t, std::string>;  // process set, name

  void run();
  void write(const TimelineEvent& event);
  void submitted(const TimelineEvent& event);
  void arrived(const TimelineEvent& event);
  void finished(const TimelineEvent& event);
  std::uint32_t lane_of(const TimelineEvent& event, std::int64_t begin);
  void overtake(const Key& key, std::uint32_t lane);
  std::uint32_t take_lane(const std::string& label, std::int64_t begin);
  std::string label_of(const TimelineEvent& event) const;
  void open(std::uint32_t lane, const TimelineEvent& event);
  void close(std::uint32_t lane, std::int64_t end, const TimelineEvent* event);
  void phase(std::uint32_t lane, std::string_view name, TimePoint begin, TimePoint end);
  void instant(std::uint32_t lane, const std::string& name, std::int64_t at);
  void begin_event(const char* phase, std::uint32_t lane, std::int64_t at);
  void header();
  void report_drops(std::uint64_t dropped);
  void put();
  std::int64_t since_start(TimePoint at) const noexcept;

  static constexpr std::uint32_t kMarksLane = 0;

  Options options_;
  TimePoint start_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::vector<TimelineEvent> queue_ GUARDED_BY(mutex_);
  bool is_stopping_ GUARDED_BY(mutex_) = false;
  bool is_broken_ GUARDED_BY(mutex_) = false;
  std::uint64_t written_ GUARDED_BY(mutex_) = 0;
  std::uint64_t dropped_ GUARDED_BY(mutex_) = 0;

  // Only the writer's thread uses these.
  TraceFile file_;
  std::string text_;     // the event under construction
  std::string trouble_;  // the error that ended the file
  std::vector<Lane> lanes_;
  std::map<std::string, std::vector<std::uint32_t>> lanes_by_label_;
  std::map<Key, std::uint32_t> owners_;
  // Lanes of unfinished device operations whose name is in use again, by name and time of submission.
  std::map<std::pair<Key, std::int64_t>, std::uint32_t> overtaken_;
  std::uint64_t reported_drops_ = 0;

  std::jthread thread_;  // last: joined before the others are destroyed
};

}  // namespace sparkhvd
