// Counters, the timeline's file, and the stacks.
#include "recorder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "error.h"
#include "json.h"
#include "message.h"
#include "stacks.h"
#include "test.h"
#include "trace_file.h"

namespace sparkhvd::test::recorder_test {
namespace {

/// A small JSON parser for the tests. Throws Failure if a text is not JSON.
struct Json {
  std::string text;  // the text of a string or number
  std::vector<Json> items;
  std::map<std::string, Json> members;

  const Json& at(const std::string& name) const {
    const auto found = members.find(name);
    if (found == members.end()) throw Failure("no member " + name);
    return found->second;
  }
  bool has(const std::string& name) const { return members.contains(name); }
  double number() const { return std::stod(text); }
};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}
  Json whole() {
    Json value = one();
    space();
    if (at_ != text_.size()) fail("more after the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) {
    throw Failure("not JSON at " + std::to_string(at_) + ": " + what + ": " +
                  text_.substr(at_ < 40 ? 0 : at_ - 40, 80));
  }
  void space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  char next() {
    if (at_ >= text_.size()) fail("it ends early");
    return text_[at_++];
  }
  bool take(char c) {
    space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Json one() {
    Json value;
    if (take('{')) {
      if (take('}')) return value;
      do {
        space();
        const Json name = one();
        if (!take(':')) fail("no colon");
        value.members[name.text] = one();
      } while (take(','));
      if (!take('}')) fail("no }");
    } else if (take('[')) {
      if (take(']')) return value;
      do {
        value.items.push_back(one());
      } while (take(','));
      if (!take(']')) fail("no ]");
    } else if (take('"')) {
      for (char c = next(); c != '"'; c = next()) {
        if (static_cast<unsigned char>(c) < 0x20) fail("a raw control character");
        if (c == '\\') c = next();
        value.text += c;
      }
    } else {
      space();
      while (at_ < text_.size() && std::string(",]} \n").find(text_[at_]) == std::string::npos) {
        value.text += text_[at_++];
      }
      if (value.text == "null" || value.text == "true" || value.text == "false") return value;
      char* end = nullptr;
      std::strtod(value.text.c_str(), &end);
      if (value.text.empty() || *end != '\0') fail("no value");
    }
    return value;
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

Json parse(const std::string& text) { return Parser(text).whole(); }

bool is_json(const std::string& text) {
  try {
    parse(text);
    return true;
  } catch (const Failure&) {
    return false;
  }
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Folder {
  std::string path;
  Folder() {
    char name[] = "/tmp/sparkhvd-test-XXXXXX";
    if (::mkdtemp(name) == nullptr) throw Failure("mkdtemp");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

Operation& begin(Recorder& recorder, Operation& operation, const std::string& name) {
  operation.name = name;
  operation.descriptor.collective = Collective::kAllreduce;
  operation.descriptor.dtype = DType::kFloat32;
  recorder.submitted(operation);
  return operation;
}

void run(Recorder& recorder, const std::string& name, std::int32_t status = SPARKHVD_OK) {
  static float tensor[100];
  Operation operation;
  operation.pieces.add(tensor, tensor, sizeof(tensor));
  begin(recorder, operation, name);
  recorder.agreed(operation);
  operation.trace.algorithm = "shared_allreduce";
  recorder.started(operation);
  recorder.finished(operation, status, status == SPARKHVD_OK ? "" : "because \"of\" \xff it");
}

std::string numbered(std::string name, int number) { return name.append(std::to_string(number)); }

/// Checks the slices of each lane: two slices must be nested or separate, and every B event must have an E event.
void check_lanes(const Json& trace) {
  std::map<double, std::vector<double>> open;  // lane -> begins
  for (const auto& event : trace.items) {
    const std::string& phase = event.at("ph").text;
    if (phase == "M") continue;
    const double lane = event.at("tid").number();
    const double ts = event.at("ts").number();
    if (phase == "B") {
      CHECK(open[lane].empty());
      open[lane].push_back(ts);
    } else if (phase == "X") {
      CHECK(!open[lane].empty());
      CHECK(ts >= open[lane].back());
      CHECK(event.at("dur").number() >= 0);
    } else if (phase == "E") {
      CHECK(!open[lane].empty());
      CHECK(ts >= open[lane].back());
      open[lane].pop_back();
    } else {
      CHECK_EQUAL(phase, "i");
    }
  }
}

std::size_t count(const Json& trace, const std::string& phase, const std::string& name) {
  std::size_t found = 0;
  for (const auto& event : trace.items) {
    if (event.at("ph").text == phase && event.has("name") && event.at("name").text == name) ++found;
  }
  return found;
}

}  // namespace

TEST(json_strings_are_valid_whatever_the_bytes) {
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; second += 5) {
      std::string text = "a";
      text += static_cast<char>(first);
      text += static_cast<char>(second);
      std::string json;
      append_json_string(json, text);
      parse(json);
      for (std::size_t at = 0; at < json.size();) {
        const auto length = utf8_length(std::string_view(json).substr(at));
        CHECK(length > 0);
        at += length;
      }
    }
  }
  std::string kept;
  append_json_string(kept, "Gr\xC3\xBC\xC3\x9F \xF0\x9F\x90\x8D");
  CHECK_EQUAL(kept, "\"Gr\xC3\xBC\xC3\x9F \xF0\x9F\x90\x8D\"");
}

TEST(recorder_counts_by_collective_and_algorithm) {
  Recorder recorder(Rank{1}, 3);
  for (int i = 0; i < 5; ++i) run(recorder, "x");
  run(recorder, "x", SPARKHVD_MISMATCH);
  Operation barrier;
  begin(recorder, barrier, "b");
  barrier.descriptor.collective = Collective::kBarrier;
  recorder.activity().waits.add(7);
  const Json counters = parse(recorder.json());
  CHECK_EQUAL(counters.at("rank").number(), 1);
  CHECK_EQUAL(counters.at("size").number(), 3);
  CHECK_EQUAL(counters.at("in_flight").number(), 1);
  CHECK_EQUAL(counters.at("waits").number(), 7);
  CHECK_EQUAL(counters.at("timeline").text, "null");
  CHECK_EQUAL(counters.at("collectives").items.size(), 1U);
  recorder.finished(barrier, SPARKHVD_SHUT_DOWN, "");
  const Json after = parse(recorder.json());
  CHECK_EQUAL(after.at("in_flight").number(), 0);
  const auto& entries = after.at("collectives").items;
  CHECK_EQUAL(entries.size(), 2U);
  CHECK_EQUAL(entries[0].at("collective").text, "allreduce");
  CHECK_EQUAL(entries[0].at("algorithm").text, "shared_allreduce");
  CHECK_EQUAL(entries[0].at("operations").number(), 5);
  CHECK_EQUAL(entries[0].at("failures").number(), 1);
  CHECK_EQUAL(entries[0].at("bytes").number(), 5 * 400);
  double in_histogram = 0;
  for (const auto& bin : entries[0].at("histogram").items) in_histogram += bin.number();
  CHECK_EQUAL(in_histogram, 6);
  CHECK_EQUAL(entries[1].at("algorithm").text, "none");
  CHECK_EQUAL(entries[1].at("failures").number(), 1);
}

TEST(recorder_times_add_up) {
  Recorder recorder(Rank{0}, 1);
  Operation operation;
  begin(recorder, operation, "x");
  operation.trace.submitted = Clock::now() - std::chrono::milliseconds(70);
  operation.trace.agreed = operation.trace.submitted + std::chrono::milliseconds(10);
  operation.trace.started = operation.trace.submitted + std::chrono::milliseconds(30);
  recorder.finished(operation, SPARKHVD_OK, "");
  const Json counters = parse(recorder.json()).at("collectives").items.at(0);
  CHECK_EQUAL(counters.at("negotiation_us").number(), 10000);
  CHECK_EQUAL(counters.at("queue_us").number(), 20000);
  CHECK(counters.at("run_us").number() >= 40000);
  CHECK(std::abs(counters.at("longest_us").number() - 30000 - counters.at("run_us").number()) <
        0.01);
  // The bins are powers of two. The time falls into bin 17 (65.5 to 131 ms), or a later bin if the thread waited for a
  // CPU.
  const auto bin = static_cast<std::size_t>(
      std::bit_width(static_cast<std::uint64_t>(counters.at("longest_us").number())));
  CHECK(bin >= 17);
  CHECK_EQUAL(counters.at("histogram").items.at(bin).number(), 1);
}

TEST(recorder_is_read_while_it_counts) {
  Recorder recorder(Rank{0}, 1);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) parse(recorder.json());
  });
  const char* algorithms[] = {"a", "b", "c", "d"};
  for (int i = 0; i < 2000; ++i) {
    Operation operation;
    begin(recorder, operation, "x");
    operation.trace.algorithm = algorithms[i % 4];
    recorder.finished(operation, SPARKHVD_OK, "");
  }
  stop = true;
  reader.join();
  CHECK_EQUAL(parse(recorder.json()).at("collectives").items.size(), 4U);
}

TEST(timeline_shows_every_operation_in_its_lane) {
  const Folder folder;
  const std::string path = folder.path + "/t.json";
  Recorder recorder(Rank{2}, 4);
  run(recorder, "before");
  recorder.start_timeline(path, true);
  recorder.arrived(0, "layer \"1\"", Rank{3});
  run(recorder, "layer \"1\"");
  run(recorder, "layer \"1\"");
  run(recorder, "bad", SPARKHVD_TIMEOUT);
  recorder.woke();
  for (int i = 0; i < 50; ++i) run(recorder, numbered("allreduce.noname.", i));
  Operation open;
  begin(recorder, open, "hangs");
  recorder.stop_timeline();
  run(recorder, "after");
  const Json trace = parse(contents(path));
  check_lanes(trace);
  CHECK_EQUAL(count(trace, "B", "allreduce"), 54U);
  CHECK_EQUAL(count(trace, "X", "NEGOTIATE_ALLREDUCE"), 53U);
  CHECK_EQUAL(count(trace, "X", "ALLREDUCE"), 53U);
  CHECK_EQUAL(count(trace, "X", "shared_allreduce"), 53U);
  CHECK_EQUAL(count(trace, "i", "rank 3 ready"), 1U);
  CHECK_EQUAL(count(trace, "i", "error: timeout"), 1U);
  CHECK_EQUAL(count(trace, "i", "CYCLE_START"), 1U);
  // The lanes: engine, layer "1", bad, allreduce.noname.*, hangs.
  CHECK_EQUAL(count(trace, "M", "thread_name"), 5U);
  CHECK_EQUAL(trace.items.at(0).at("args").at("name").text, "rank 2");
}

TEST(timeline_shows_operations_of_one_name_that_a_device_has_together) {
  const Folder folder;
  const std::string path = folder.path + "/t.json";
  Recorder recorder(Rank{0}, 2);
  recorder.start_timeline(path, false);
  std::vector<Operation> operations(3);
  for (auto& operation : operations) {
    operation.descriptor.is_on_device = true;
    begin(recorder, operation, "gradients");
  }
  for (const auto& operation : operations) recorder.finished(operation, SPARKHVD_OK, "");
  Operation later;
  recorder.finished(begin(recorder, later, "gradients"), SPARKHVD_OK, "");
  recorder.stop_timeline();
  const Json trace = parse(contents(path));
  check_lanes(trace);
  CHECK_EQUAL(count(trace, "B", "allreduce"), 4U);
  std::size_t num_ended = 0;
  for (const auto& event : trace.items) {
    if (event.at("ph").text == "E" && event.has("args")) ++num_ended;
  }
  CHECK_EQUAL(num_ended, 4U);  // each operation has ended its own slice
}

/// True if a file that is being written is valid JSON, or soon changes. Reads and writes are not atomic, so a read may
/// see invalid text. The text must then change soon, when the writer gets the CPU back.
bool is_valid_or_changes(const std::string& path) {
  const std::string seen = contents(path);
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  while (!is_json(seen) && contents(path) == seen) {
    CHECK_MESSAGE(Clock::now() < deadline, seen);
    std::this_thread::yield();
  }
  return is_json(seen);
}

TEST(timeline_is_valid_json_at_every_moment) {
  const Folder folder;
  const std::string path = folder.path + "/t.json";
  Recorder recorder(Rank{0}, 1);
  recorder.start_timeline(path, false);
  is_valid_or_changes(path);
  std::size_t looks = 0;
#ifdef __SANITIZE_ADDRESS__  // fewer, because the time grows with the square of the number
  constexpr std::size_t kOperations = 140;
#else
  constexpr std::size_t kOperations = 200;
#endif
  for (std::size_t i = 0; i < kOperations; ++i) {
    run(recorder, numbered("x", static_cast<int>(i % 7)));
    looks += is_valid_or_changes(path) ? 1 : 0;
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
  CHECK(looks > kOperations / 4);
  recorder.stop_timeline();
  CHECK_EQUAL(count(parse(contents(path)), "B", "allreduce"), kOperations);
}

TEST(trace_file_of_a_killed_writer_is_valid) {
  const Folder folder;
  const std::string path = folder.path + "/t.json";
  std::size_t items = 0;
  for (int round = 0; round < 30; ++round) {
    int begun[2];
    CHECK_EQUAL(::pipe2(begun, O_CLOEXEC), 0);
    const pid_t writer = ::fork();
    if (writer == 0) {
      TraceFile file(path);
      if (!file.reserve(8 << 20).empty() || ::write(begun[1], "b", 1) != 1) ::_exit(1);
      // The items fit into the reserved room. Beyond it the file would grow, and a reader that waits long for the CPU
      // would have much to parse.
      for (int i = 0; i < 18000; ++i) {
        std::string item(static_cast<std::size_t>(2 + i * 37 % 700), 'x');
        item.front() = item.back() = '"';
        if (!file.append(item).empty() || (i % 5 == 0 && !file.flush().empty())) ::_exit(1);
      }
      for (;;) ::pause();
    }
    ::close(begun[1]);
    char byte = 0;
    CHECK_EQUAL(::read(begun[0], &byte, 1), 1);
    ::close(begun[0]);
    std::this_thread::sleep_for(std::chrono::microseconds(200 + 31 * round));
    ::kill(writer, SIGKILL);
    int status = 0;
    CHECK_EQUAL(::waitpid(writer, &status, 0), writer);
    CHECK_MESSAGE(WIFSIGNALED(status), "the writer ended by itself");
    items += parse(contents(path)).items.size();
  }
  CHECK_MESSAGE(items > 500, std::to_string(items));
}

TEST(trace_file_keeps_every_item_in_order) {
  const Folder folder;
  const std::string path = folder.path + "/t.json";
  for (const std::size_t count : {0U, 1U, 2U, 40U, 3000U}) {
    {
      TraceFile file(path);
      for (std::size_t i = 0; i < count; ++i) {
        std::string item = R"({"i":)";
        item.append(std::to_string(i)).append(i * 97 % 3000, ' ').append("}");
        CHECK_EQUAL(file.append(item), "");
        if (i % 7 == 0) CHECK_EQUAL(file.flush(), "");
      }
      CHECK_EQUAL(file.append(std::string(TraceFile::kMaxItemBytes + 1, '1')), "");  // dropped
    }
    const std::string text = contents(path);
    CHECK(text.ends_with("\n]\n"));
    const Json found = parse(text);
    CHECK_EQUAL(found.items.size(), count);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK_EQUAL(found.items[i].at("i").text, std::to_string(i));
    }
  }
}

TEST(timeline_can_be_started_again_elsewhere) {
  const Folder folder;
  Recorder recorder(Rank{0}, 1);
  recorder.stop_timeline();
  recorder.start_timeline(folder.path + "/a.json", false);
  run(recorder, "x");
  recorder.start_timeline(folder.path + "/b.json", false);  // ends the first timeline
  run(recorder, "y");
  run(recorder, "y");
  recorder.stop_timeline();
  recorder.stop_timeline();
  CHECK_EQUAL(count(parse(contents(folder.path + "/a.json")), "B", "allreduce"), 1U);
  CHECK_EQUAL(count(parse(contents(folder.path + "/b.json")), "B", "allreduce"), 2U);
}

TEST(timeline_drops_and_says_so_instead_of_growing) {
  const Folder folder;
  Timeline::Options options;
  options.path = folder.path + "/t.json";
  options.max_queued = 8;
  options.warn = [](const std::string& text) { throw Failure(text); };
  {
    Timeline timeline(options);
    TimelineEvent event;
    event.kind = TimelineEvent::Kind::kMark;
    event.name = "m";
    for (int i = 0; i < 5000; ++i) timeline.add(event);
    const auto statistics = timeline.statistics();
    CHECK(statistics.dropped >= 4000);
    while (timeline.statistics().written < 8) std::this_thread::yield();
    timeline.add(event);
  }
  const std::string text = contents(options.path);
  parse(text);
  CHECK(text.find("events dropped") != std::string::npos);
}

TEST(timeline_operations_whose_events_were_lost_leave_valid_slices) {
  const Folder folder;
  Timeline::Options options;
  options.path = folder.path + "/t.json";
  options.warn = [](const std::string& text) { throw Failure(text); };
  {
    Timeline timeline(options);
    TimelineEvent event;
    event.name = "x";
    event.kind = TimelineEvent::Kind::kSubmitted;
    event.trace.submitted = Clock::now();
    timeline.add(event);
    timeline.add(event);  // the end of the previous operation was dropped
    event.kind = TimelineEvent::Kind::kFinished;
    event.at = Clock::now();
    timeline.add(event);
    timeline.add(event);  // submitted before the timeline began
  }
  const Json trace = parse(contents(options.path));
  check_lanes(trace);
  CHECK_EQUAL(count(trace, "B", "allreduce"), 3U);
}

TEST(timeline_has_few_lanes_for_many_names) {
  const Folder folder;
  const std::string path = folder.path + "/t.json";
  Recorder recorder(Rank{0}, 1);
  recorder.start_timeline(path, false);
  for (int i = 0; i < 3000; ++i) {
    run(recorder, numbered("step ", i).append(1, static_cast<char>('a' + i % 26)));
  }
  recorder.stop_timeline();
  const Json trace = parse(contents(path));
  check_lanes(trace);
  CHECK(count(trace, "M", "thread_name") < 450);
  CHECK_EQUAL(count(trace, "B", "allreduce"), 3000U);
}

TEST(timeline_on_a_full_disk_warns_once_and_stays_valid) {
  const Folder folder;
  std::atomic<int> warnings{0};
  Timeline::Options options;
  options.path = folder.path + "/t.json";
  options.warn = [&](const std::string& text) {
    ++warnings;
    CHECK(text.find(options.path) != std::string::npos);
    CHECK(text.find("Training continues") != std::string::npos);
  };
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit limit = before;
  limit.rlim_cur = 20000;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::uint64_t dropped = 0;
  {
    Timeline timeline(options);
    TimelineEvent event;
    event.kind = TimelineEvent::Kind::kMark;
    event.name = std::string(150, 'm');
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    for (int i = 0; i < 300 || (warnings == 0 && Clock::now() < deadline); ++i) {
      timeline.add(event);
      std::this_thread::sleep_for(std::chrono::microseconds(400));
    }
    timeline.add(event);
    dropped = timeline.statistics().dropped;
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  CHECK_EQUAL(warnings.load(), 1);
  CHECK(dropped > 0);
  const std::string text = contents(options.path);
  CHECK(text.size() <= 20000);
  CHECK(count(parse(text), "i", std::string(150, 'm')) > 20);
}

TEST(timeline_that_cannot_be_written_is_an_error_at_once) {
  const Folder folder;
  Recorder recorder(Rank{0}, 1);
  const auto message_of = [&](const std::string& path) -> std::string {
    try {
      recorder.start_timeline(path, false);
    } catch (const Error& error) {
      CHECK_EQUAL(error.status(), SPARKHVD_INVALID_ARGUMENT);
      return error.what();
    }
    return {};
  };
  CHECK_EQUAL(
      message_of("/nowhere/t.json"),
      "start_timeline('/nowhere/t.json'): No such file or directory (errno 2). Give a path of "
      "a file that this process may write.");
  CHECK(message_of("/dev/full").find("it is not a plain file") != std::string::npos);
  CHECK(message_of(folder.path).find("Is a directory") != std::string::npos);
  const std::string pipe = folder.path + "/pipe";
  CHECK_EQUAL(::mkfifo(pipe.c_str(), 0600), 0);
  CHECK(message_of(pipe).find("start_timeline") != std::string::npos);  // and the call returns
  run(recorder, "continues");
}

// ---- Stacks ------------------------------------------------------------------------------------

namespace {
int stack_pipe[2] = {-1, -1};
void write_stack(int) {
  const char text[] = "File \"x.py\", line 7\n\x1b[31m";
  [[maybe_unused]] const auto written = ::write(stack_pipe[1], text, sizeof(text) - 1);
}
void fill_pipe(int) {
  char text[4096];
  std::memset(text, 'x', sizeof(text));
  for (int i = 0; i < 100; ++i) {  // writes much more than a pipe holds
    [[maybe_unused]] const auto written = ::write(stack_pipe[1], text, sizeof(text));
  }
}
}  // namespace

TEST(stacks_come_from_the_handler_and_never_end_the_process) {
  CHECK_EQUAL(::pipe2(stack_pipe, O_CLOEXEC | O_NONBLOCK), 0);
  const int number = SIGRTMIN + 11;
  CHECK_THROWS(Error, Stacks(number, stack_pipe[0]));  // the signal has no handler
  CHECK_THROWS(Error, Stacks(1000, stack_pipe[0]));
  ::signal(number, write_stack);
  CHECK_THROWS(Error, Stacks(number, -1));
  {
    const Stacks stacks(number, stack_pipe[0]);
    CHECK_EQUAL(::write(stack_pipe[1], "old", 3), 3);
    CHECK_EQUAL(stacks.take(), "File \"x.py\", line 7\n?[31m");
    CHECK_EQUAL(stacks.take(), "File \"x.py\", line 7\n?[31m");
    // The signal is blocked in this thread. The engine must unblock it, and only while it takes the stacks.
    sigset_t only;
    sigset_t seen;
    ::sigemptyset(&only);
    ::sigaddset(&only, number);
    ::pthread_sigmask(SIG_BLOCK, &only, nullptr);
    CHECK_EQUAL(stacks.take(), "File \"x.py\", line 7\n?[31m");
    ::pthread_sigmask(SIG_UNBLOCK, &only, &seen);
    CHECK_EQUAL(::sigismember(&seen, number), 1);
    ::signal(number, SIG_DFL);  // raising it now would end the process
    CHECK(stacks.take().find("was replaced") != std::string::npos);
  }
  ::signal(number, fill_pipe);
  const Stacks stacks(number, stack_pipe[0]);
  CHECK(stacks.take().size() == kMaxStackBytes);
  ::signal(number, SIG_DFL);
  CHECK(Stacks().take().find("no stack") != std::string::npos);
  ::close(stack_pipe[0]);
  ::close(stack_pipe[1]);
}

}  // namespace sparkhvd::test::recorder_test
