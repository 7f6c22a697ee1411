#include "timeline.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "error.h"
#include "json.h"
#include "text.h"

namespace sparkhvd {
namespace {

// The writer collects events for this time: long enough to write many events at once, and short enough that a killed
// process loses few events.
constexpr auto kBatchTime = std::chrono::milliseconds(50);
// Bytes reserved in the file before the first event. Later reservations double.
constexpr std::uint64_t kFirstBytes = 1 << 20;
constexpr std::size_t kMaxShownName = 200;
// Longest message: it fits into an item of the file even if every byte is escaped.
constexpr std::size_t kMaxShownMessage = 400;
// Largest number of operations with arrived ranks. Arrivals of further names are dropped, because an operation that
// never runs would keep its lane forever.
constexpr std::size_t kMaxOwners = 4096;

std::string status_text(std::int32_t status) {
  switch (status) {
    case SPARKHVD_OK:
      return "ok";
    case SPARKHVD_MISMATCH:
      return "mismatch";
    case SPARKHVD_TIMEOUT:
      return "timeout";
    case SPARKHVD_PEER_LOST:
      return "peer lost";
    case SPARKHVD_SHUT_DOWN:
      return "shut down";
    default:
      return "status " + std::to_string(status);
  }
}

/// Name of a collective in upper case, because Horovod's tools expect Horovod's names.
std::string upper_case(std::string_view name) {
  std::string found(name);
  for (char& c : found) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return found;
}

}  // namespace

Timeline::Timeline(Options options)
    : options_(std::move(options)), start_(Clock::now()), file_(options_.path) {
  header();
  // The writer thread blocks all signals, because they are for the program's threads. It sees a full quota in the
  // result of the write, so it does not need SIGXFSZ.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::jthread([this] { run(); });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Timeline::~Timeline() {
  {
    const Lock lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Timeline::add(TimelineEvent event) {
  if (event.name.size() > kMaxShownName) event.name.resize(kMaxShownName);
  bool was_empty = false;
  {
    const Lock lock(mutex_);
    if (is_broken_ || queue_.size() >= options_.max_queued) {
      ++dropped_;
      return;
    }
    was_empty = queue_.empty();
    queue_.push_back(std::move(event));
  }
  if (was_empty) changed_.notify_one();
}

Timeline::Statistics Timeline::statistics() const {
  const Lock lock(mutex_);
  return {written_, dropped_};
}

// ---- The writer's thread ---------------------------------------------------------------------

void Timeline::run() {
  ::pthread_setname_np(::pthread_self(), "sparkhvd-trace");
  std::vector<TimelineEvent> batch;
  [[maybe_unused]] const auto later =
      file_.reserve(kFirstBytes);  // an error comes again when an event needs the room
  while (true) {
    std::uint64_t dropped = 0;
    {
      Lock lock(mutex_);
      while (!is_stopping_ && queue_.empty()) lock.wait(changed_, kNever);
      // Collects more events, so that a training step costs one write and not one per operation.
      const TimePoint batch_end = Clock::now() + kBatchTime;
      while (!is_stopping_ && lock.wait(changed_, batch_end)) {
      }
      if (queue_.empty()) return;  // is_stopping_, and no event waits
      batch.swap(queue_);
      dropped = dropped_;
    }
    std::size_t in_file = 0;
    report_drops(dropped);
    for (const auto& event : batch) {
      write(event);
      if (!trouble_.empty()) break;
      ++in_file;
    }
    if (trouble_.empty()) trouble_ = file_.flush();
    {
      const Lock lock(mutex_);
      written_ += in_file;
      if (!trouble_.empty()) {
        is_broken_ = true;
        dropped_ += batch.size() - in_file + queue_.size();
        queue_.clear();
      }
    }
    batch.clear();
    if (trouble_.empty()) continue;
    options_.warn("the timeline '" + options_.path + "' ends here: " + trouble_ +
                  ". Training continues without it.");
    return;
  }
}

/// Writes the event in `text_` into the file.
void Timeline::put() {
  if (trouble_.empty()) trouble_ = file_.append(text_);
  text_.clear();
}

std::int64_t Timeline::since_start(TimePoint at) const noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at - start_).count();
}

/// Writes the beginning of an event up to its arguments. The trace event format requires microseconds.
void Timeline::begin_event(const char* phase, std::uint32_t lane, std::int64_t at) {
  char head[128];
  const std::int64_t whole = at / 1000;
  const auto rest = static_cast<int>(at % 1000);
  // Events before the start of the timeline have negative times.
  std::snprintf(head, sizeof(head), "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%u,\"ts\":%s%lld.%03d",
                phase, index_of(options_.rank), lane, at < 0 ? "-" : "",
                static_cast<long long>(whole < 0 ? -whole : whole), rest < 0 ? -rest : rest);
  text_ += head;
}

void Timeline::header() {
  const auto epoch = std::chrono::system_clock::now().time_since_epoch();
  const std::string pid = std::to_string(index_of(options_.rank));
  const std::string head = R"({"ph":"M","pid":)" + pid;
  text_ = head + R"(,"name":"process_name","args":{"name":"rank )" + pid + R"("}})";
  put();
  text_ = head + R"(,"name":"process_sort_index","args":{"sort_index":)" + pid + "}}";
  put();
  text_ =
      head + R"(,"name":"sparkhvd","args":{"rank":)" + pid + R"(,"size":)" +
      std::to_string(options_.size) + R"(,"start_time_since_epoch_in_micros":)" +
      std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(epoch).count()) +
      R"(,"start_monotonic_ns":)" +
      std::to_string(
          std::chrono::duration_cast<std::chrono::nanoseconds>(start_.time_since_epoch()).count()) +
      "}}";
  put();
  text_ = head + R"(,"tid":0,"name":"thread_name","args":{"name":"engine"}})";
  put();
  if (trouble_.empty()) trouble_ = file_.flush();
  lanes_.push_back({});  // kMarksLane
}

void Timeline::report_drops(std::uint64_t dropped) {
  if (dropped == reported_drops_) return;
  instant(kMarksLane, std::to_string(dropped - reported_drops_) + " events dropped",
          since_start(Clock::now()));
  reported_drops_ = dropped;
}

void Timeline::write(const TimelineEvent& event) {
  switch (event.kind) {
    case TimelineEvent::Kind::kSubmitted:
      return submitted(event);
    case TimelineEvent::Kind::kArrived:
      return arrived(event);
    case TimelineEvent::Kind::kFinished:
      return finished(event);
    case TimelineEvent::Kind::kMark:
      return instant(kMarksLane, event.name, since_start(event.at));
  }
}

void Timeline::submitted(const TimelineEvent& event) {
  const std::int64_t begin = since_start(event.trace.submitted);
  auto lane = lane_of(event, begin);
  if (lanes_[lane].is_open && lanes_[lane].is_on_device) {
    overtake({event.process_set, event.name}, lane);
    lane = lane_of(event, begin);
  }
  // The end of the previous slice was dropped, because a name cannot be in flight twice (except on a device).
  if (lanes_[lane].is_open) close(lane, begin, nullptr);
  open(lane, event);
}

/// Frees a name that is in use again while its device operation still runs. The running operation keeps the lane.
void Timeline::overtake(const Key& key, std::uint32_t lane) {
  owners_.erase(key);
  overtaken_.insert_or_assign({key, lanes_[lane].submitted}, lane);
  if (overtaken_.size() <= kMaxOwners) return;
  // So many device operations cannot be in flight: the end of the oldest operation was dropped.
  const auto oldest = std::ranges::min_element(
      overtaken_, {}, [](const auto& entry) { return entry.first.second; });
  close(oldest->second, lanes_[oldest->second].begin, nullptr);
  lanes_[oldest->second].has_owner = false;
  overtaken_.erase(oldest);
}

void Timeline::arrived(const TimelineEvent& event) {
  const bool is_known = owners_.contains({event.process_set, event.name});
  if (!is_known && owners_.size() >= kMaxOwners) return;
  const std::int64_t at = since_start(event.at);
  instant(lane_of(event, at), rank_text(event.rank) + " ready", at);
}

void Timeline::finished(const TimelineEvent& event) {
  const Key key{event.process_set, event.name};
  const std::int64_t submitted = since_start(event.trace.submitted);
  const auto overtaken = overtaken_.find({key, submitted});
  const auto lane = overtaken != overtaken_.end() ? overtaken->second : lane_of(event, submitted);
  if (!lanes_[lane].is_open) open(lane, event);  // submitted before the timeline began
  const auto& trace = event.trace;
  const TimePoint nowhere{};
  const auto end_of = [&](TimePoint next) { return next == nowhere ? event.at : next; };
  const std::string horovods = upper_case(name_of(event.collective));
  phase(lane, "NEGOTIATE_" + horovods, trace.submitted, end_of(trace.agreed));
  if (trace.agreed != nowhere) {
    phase(lane, horovods, trace.agreed, event.at);
    phase(lane, "queue", trace.agreed, end_of(trace.started));
  }
  if (trace.started != nowhere) {
    phase(lane, *trace.algorithm == '\0' ? name_of(event.collective) : trace.algorithm,
          trace.started, event.at);
  }
  const std::int64_t end = since_start(event.at);
  if (event.status != SPARKHVD_OK) instant(lane, "error: " + status_text(event.status), end);
  close(lane, end, &event);
  lanes_[lane].has_owner = false;
  if (overtaken != overtaken_.end()) {
    overtaken_.erase(overtaken);
  } else {
    owners_.erase(key);
  }
}

void Timeline::open(std::uint32_t lane, const TimelineEvent& event) {
  Lane& row = lanes_[lane];
  row.begin = std::max(since_start(event.trace.submitted), row.free_from);
  row.is_open = true;
  row.is_on_device = event.is_on_device;
  row.submitted = since_start(event.trace.submitted);
  begin_event("B", lane, row.begin);
  text_ += R"(,"cat":"sparkhvd","name":")";
  text_ += name_of(event.collective);
  text_ += R"(","args":{"name":)";
  append_json_string(text_, event.name);
  text_ += R"(,"process_set":)" + std::to_string(event.process_set) + R"(,"bytes":)" +
           std::to_string(event.bytes) + R"(,"dtype":")";
  text_ += name_of(event.dtype);
  text_ += "\"}}";
  put();
}

void Timeline::close(std::uint32_t lane, std::int64_t end, const TimelineEvent* event) {
  Lane& row = lanes_[lane];
  end = std::max(end, row.begin);
  begin_event("E", lane, end);
  if (event != nullptr) {
    text_ += R"(,"args":{"status":")" + status_text(event->status) + '"';
    if (!event->message.empty()) {
      text_ += R"(,"message":)";
      append_json_string(text_, event->message.substr(0, kMaxShownMessage));
    }
    text_ += '}';
  }
  text_ += '}';
  put();
  row.is_open = false;
  row.free_from = end;
}

void Timeline::phase(std::uint32_t lane, std::string_view name, TimePoint begin, TimePoint end) {
  const std::int64_t from = std::max(since_start(begin), lanes_[lane].begin);
  const std::int64_t length = std::max<std::int64_t>(0, since_start(end) - from);
  begin_event("X", lane, from);
  char rest[64];
  std::snprintf(rest, sizeof(rest), ",\"dur\":%lld.%03d", static_cast<long long>(length / 1000),
                static_cast<int>(length % 1000));
  text_ += rest;
  text_ += R"(,"cat":"sparkhvd","name":")";
  text_ += name;
  text_ += "\"}";
  put();
}

void Timeline::instant(std::uint32_t lane, const std::string& name, std::int64_t at) {
  begin_event("i", lane, at);
  text_ += R"(,"s":"t","cat":"sparkhvd","name":)";
  append_json_string(text_, name);
  text_ += '}';
  put();
}

}  // namespace sparkhvd
