#include "recorder.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "json.h"

namespace sparkhvd {
namespace {

std::uint64_t nanoseconds_between(TimePoint begin, TimePoint end) noexcept {
  const auto length = std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
  return length < 0 ? 0 : static_cast<std::uint64_t>(length);
}

void append_number(std::string& out, const char* name, std::uint64_t value) {
  out += '"';
  out += name;
  out += "\":";
  out += std::to_string(value);
}

/// Appends a time as a JSON member, in microseconds with three decimals.
void append_us(std::string& out, const char* name, std::uint64_t nanoseconds) {
  char text[96];
  std::snprintf(text, sizeof(text), "\"%s\":%llu.%03u", name,
                static_cast<unsigned long long>(nanoseconds / 1000),
                static_cast<unsigned>(nanoseconds % 1000));
  out += text;
}

}  // namespace

// ---- Operations ------------------------------------------------------------------------------

void Recorder::submitted(Operation& operation) {
  operation.trace.submitted = Clock::now();
  in_flight_submitted_.add_alone();
  if (!has_timeline_.load(std::memory_order_relaxed)) return;
  add(event_of(operation, TimelineEvent::Kind::kSubmitted));
}

void Recorder::finished(const Operation& operation, std::int32_t status,
                        const std::string& message) {
  const auto now = Clock::now();
  const auto& trace = operation.trace;
  Entry& entry = entry_of(operation);
  in_flight_finished_.add_alone();
  (status == SPARKHVD_OK ? entry.operations : entry.failures).add_alone();
  // An operation that failed early has not reached all stages: the time until its end counts in its last stage.
  const TimePoint nowhere{};
  const TimePoint agreed = trace.agreed == nowhere ? now : trace.agreed;
  const TimePoint started = trace.started == nowhere ? now : trace.started;
  entry.negotiation.add_alone(nanoseconds_between(trace.submitted, agreed));
  if (trace.agreed != nowhere) entry.queue.add_alone(nanoseconds_between(agreed, started));
  if (trace.started != nowhere) entry.run.add_alone(nanoseconds_between(started, now));
  const std::uint64_t whole = nanoseconds_between(trace.submitted, now);
  entry.longest.raise_alone(whole);
  const auto power = static_cast<std::size_t>(std::bit_width(whole / 1000));
  entry.histogram[std::min(power, entry.histogram.size() - 1)].add_alone();
  if (status == SPARKHVD_OK) entry.bytes.add_alone(operation.pieces.bytes());
  if (!has_timeline_.load(std::memory_order_relaxed)) return;
  auto event = event_of(operation, TimelineEvent::Kind::kFinished);
  event.at = now;
  event.status = status;
  event.message = message;
  add(std::move(event));
}

void Recorder::arrived(std::int32_t process_set, const std::string& name, Rank rank) {
  if (!has_timeline_.load(std::memory_order_relaxed)) return;
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kArrived;
  event.process_set = process_set;
  event.name = name;
  event.rank = rank;
  event.at = Clock::now();
  add(std::move(event));
}

void Recorder::woke() {
  if (!has_timeline_.load(std::memory_order_relaxed)) return;
  const Lock lock(mutex_);
  if (!timeline_ || !timeline_->marks_cycles()) return;
  TimelineEvent event;
  event.kind = TimelineEvent::Kind::kMark;
  event.name = "CYCLE_START";  // for Horovod's tools
  event.at = Clock::now();
  timeline_->add(std::move(event));
}

/// The entry of the operation's collective and algorithm. There are few entries, so a linear search is fast.
Recorder::Entry& Recorder::entry_of(const Operation& operation) {
  const Collective collective = operation.descriptor.collective;
  const char* algorithm = operation.trace.algorithm;
  const std::size_t count = num_entries_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < count; ++i) {
    Entry& entry = entries_[i];
    if (entry.collective != collective) continue;
    if (entry.algorithm == algorithm || std::strcmp(entry.algorithm, algorithm) == 0) return entry;
  }
  // Not reached in practice, because each collective has few algorithms.
  if (count == kMaxEntries) return entries_[kMaxEntries - 1];
  Entry& made = entries_[count];
  made.collective = collective;
  made.algorithm = algorithm;
  num_entries_.store(count + 1, std::memory_order_release);
  return made;
}

// ---- The timeline ----------------------------------------------------------------------------

TimelineEvent Recorder::event_of(const Operation& operation, TimelineEvent::Kind kind) {
  TimelineEvent event;
  event.kind = kind;
  event.name = operation.name;
  event.process_set = operation.process_set;
  event.collective = operation.descriptor.collective;
  event.dtype = operation.descriptor.dtype;
  event.is_on_device = operation.descriptor.is_on_device;
  event.bytes = operation.pieces.bytes();
  event.trace = operation.trace;
  return event;
}

void Recorder::add(TimelineEvent event) {
  const Lock lock(mutex_);
  if (timeline_) timeline_->add(std::move(event));
}

void Recorder::start_timeline(const std::string& path, bool mark_cycles) {
  stop_timeline();
  Timeline::Options options;
  options.path = path;
  options.rank = rank_;
  options.size = size_;
  options.mark_cycles = mark_cycles;
  options.warn = [](const std::string& text) {
    std::fprintf(stderr, "sparkhvd warning: %s\n", text.c_str());
  };
  auto made = std::make_unique<Timeline>(std::move(options));
  // A timeline that another thread has started meanwhile; its destructor runs outside the lock.
  std::unique_ptr<Timeline> other;
  {
    const Lock lock(mutex_);
    other = std::exchange(timeline_, std::move(made));
    has_timeline_.store(true, std::memory_order_relaxed);
  }
}

void Recorder::stop_timeline() {
  std::unique_ptr<Timeline> ended;
  {
    const Lock lock(mutex_);
    ended = std::move(timeline_);
    has_timeline_.store(false, std::memory_order_relaxed);
  }
}

// ---- The counters ----------------------------------------------------------------------------

void Recorder::append(std::string& out, const Entry& entry) {
  out += R"({"collective":")";
  out += name_of(entry.collective);
  out += R"(","algorithm":)";
  append_json_string(out, *entry.algorithm == '\0' ? "none" : entry.algorithm);
  const auto number = [&](const char* name, const Counter& counter) {
    out += ',';
    append_number(out, name, counter.value());
  };
  const auto time = [&](const char* name, const Counter& counter) {
    out += ',';
    append_us(out, name, counter.value());
  };
  number("operations", entry.operations);
  number("failures", entry.failures);
  number("bytes", entry.bytes);
  time("negotiation_us", entry.negotiation);
  time("queue_us", entry.queue);
  time("run_us", entry.run);
  time("longest_us", entry.longest);
  out += R"(,"histogram":[)";
  for (std::size_t i = 0; i < entry.histogram.size(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(entry.histogram[i].value());
  }
  out += "]}";
}

std::string Recorder::json() const {
  std::string out = "{";
  append_number(out, "rank", static_cast<std::uint64_t>(index_of(rank_)));
  const auto number = [&](const char* name, std::uint64_t value) {
    out += ',';
    append_number(out, name, value);
  };
  number("size", size_);
  out += ',';
  append_us(out, "uptime_us", nanoseconds_between(since_, Clock::now()));
  // `finished` is read first: the difference would be negative if an operation finished between the reads.
  const std::uint64_t done = in_flight_finished_.value();
  const std::uint64_t begun = in_flight_submitted_.value();
  number("in_flight", begun > done ? begun - done : 0);
  number("waits", activity_.waits.value());
  number("spins", activity_.spins.value());
  number("failed_spins", activity_.failed_spins.value());
  number("wakeups", activity_.wakeups.value());
  number("sent_bytes", activity_.sockets.sent.value());
  number("received_bytes", activity_.sockets.received.value());
  number("shared_bytes", activity_.shared_bytes.value());
  number("stall_warnings", activity_.stall_warnings.value());
  out += R"(,"collectives":[)";
  const std::size_t count = num_entries_.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) out += ',';
    append(out, entries_[i]);
  }
  out += R"(],"timeline":)";
  const Lock lock(mutex_);
  if (timeline_) {
    const auto statistics = timeline_->statistics();
    out += R"({"path":)";
    append_json_string(out, timeline_->path());
    number("written_events", statistics.written);
    number("dropped_events", statistics.dropped);
    out += "}";
  } else {
    out += "null";
  }
  return out + "}";
}

}  // namespace sparkhvd
