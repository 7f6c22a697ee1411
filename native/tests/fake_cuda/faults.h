// Rules of tests for the stand-ins (calls that fail, hang or come late), counts of calls, and recorded misuse.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fake {

enum class Action { kFail, kDelay, kHang, kSkip };

struct Rule {
  std::string function;
  Action action = Action::kFail;
  int value = 0;  // the result to return, or microseconds
  int countdown = 1;
};

/// How a rule changes a call. Both fields are unset for an ordinary call.
struct Verdict {
  std::optional<int> result;
  bool is_skipped = false;
};

class Faults {
 public:
  /// Reads rules from the environment variable FAKE_CUDA, for processes that a test starts.
  Faults();

  void add(Rule rule);
  /// Counts the call, and sleeps or hangs if a rule says so. `stop` ends a hang.
  Verdict enter(const std::string& function, const std::function<bool()>& stop = {});
  int count(const std::string& function);
  void reset();

  void misuse(const std::string& what);
  const char* first_misuse();

  void set_stream_delay_us(int us) { stream_delay_us_ = us; }
  int stream_delay_us() const { return stream_delay_us_; }
  void set_idle(bool is_idle) { is_idle_ = is_idle; }
  bool is_idle() const { return is_idle_; }

 private:
  void parse(const std::string& text);

  std::mutex mutex_;  // guards everything except the atomic
  std::condition_variable let_go_;
  std::uint64_t resets_ = 0;
  std::vector<Rule> rules_;
  std::map<std::string, int> counts_;
  std::list<std::string> texts_;  // misuse; never freed, because callers keep pointers to the text
  const std::string* first_ = nullptr;
  std::atomic<int> stream_delay_us_ = 0;
  std::atomic<bool> is_idle_ = false;
};

/// The rules of this process. They are never destroyed, because threads of streams may outlive main.
Faults& faults();

}  // namespace fake
