#include "faults.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "fake_cuda.h"

namespace fake {

Faults& faults() {
  static auto* const all = new Faults;
  return *all;
}

Faults::Faults() {
  if (const char* text = std::getenv("FAKE_CUDA")) parse(text);
}

// Parses rules such as
// "fail:ncclAllReduce:3:6,delay:cuEventRecord:1:5000,hang:ncclBroadcast:2,skip_wait:4,stream_delay:200".
void Faults::parse(const std::string& text) {
  std::istringstream rules(text);
  for (std::string rule; std::getline(rules, rule, ',');) {
    std::istringstream parts(rule);
    std::vector<std::string> words;
    for (std::string word; std::getline(parts, word, ':');) words.push_back(word);
    const auto number = [&](std::size_t i) { return std::stoi(words.at(i)); };
    if (words.at(0) == "fail") {
      add({words.at(1), Action::kFail, number(3), number(2)});
    } else if (words[0] == "delay") {
      add({words.at(1), Action::kDelay, number(3), number(2)});
    } else if (words[0] == "hang") {
      add({words.at(1), Action::kHang, 0, number(2)});
    } else if (words[0] == "skip_wait") {
      add({"cuStreamWaitEvent", Action::kSkip, 0, number(1)});
    } else if (words[0] == "stream_delay") {
      stream_delay_us_ = number(1);
    } else {
      std::fprintf(stderr, "FAKE_CUDA: no rule is called '%s'\n", words[0].c_str());
      std::abort();
    }
  }
}

void Faults::add(Rule rule) {
  const std::scoped_lock lock(mutex_);
  rules_.push_back(std::move(rule));
}

Verdict Faults::enter(const std::string& function, const std::function<bool()>& stop) {
  if (is_idle_) return {};
  Verdict verdict;
  int delay_us = 0;
  std::unique_lock lock(mutex_);
  ++counts_[function];
  const std::uint64_t resets = resets_;
  bool hangs = false;
  std::erase_if(rules_, [&](Rule& rule) {
    if (rule.function != function || --rule.countdown > 0) return false;
    if (rule.action == Action::kFail) verdict.result = rule.value;
    if (rule.action == Action::kDelay) delay_us += rule.value;
    if (rule.action == Action::kHang) hangs = true;
    if (rule.action == Action::kSkip) verdict.is_skipped = true;
    return true;
  });
  while (hangs && resets == resets_ && !(stop && stop())) {
    let_go_.wait_for(lock, std::chrono::milliseconds(1));
  }
  lock.unlock();
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return verdict;
}

int Faults::count(const std::string& function) {
  const std::scoped_lock lock(mutex_);
  const auto found = counts_.find(function);
  return found != counts_.end() ? found->second : 0;
}

void Faults::reset() {
  const std::scoped_lock lock(mutex_);
  ++resets_;
  rules_.clear();
  counts_.clear();
  first_ = nullptr;
  stream_delay_us_ = 0;
  let_go_.notify_all();
}

void Faults::misuse(const std::string& what) {
  const std::scoped_lock lock(mutex_);
  texts_.push_back(what);
  if (first_ == nullptr) first_ = &texts_.back();
}

const char* Faults::first_misuse() {
  const std::scoped_lock lock(mutex_);
  return first_ != nullptr ? first_->c_str() : "";
}

}  // namespace fake

extern "C" {

void fake_cuda_fail(const char* function, int nth, int result) {
  fake::faults().add({function, fake::Action::kFail, result, nth});
}

void fake_cuda_delay_us(const char* function, int nth, int us) {
  fake::faults().add({function, fake::Action::kDelay, us, nth});
}

void fake_cuda_hang(const char* function, int nth) {
  fake::faults().add({function, fake::Action::kHang, 0, nth});
}

void fake_cuda_skip_wait(int nth) {
  fake::faults().add({"cuStreamWaitEvent", fake::Action::kSkip, 0, nth});
}

void fake_cuda_stream_delay_us(int us) { fake::faults().set_stream_delay_us(us); }

void fake_cuda_idle(int is_idle) { fake::faults().set_idle(is_idle != 0); }

int fake_cuda_count(const char* function) { return fake::faults().count(function); }

void fake_cuda_reset() { fake::faults().reset(); }

const char* fake_cuda_misuse() { return fake::faults().first_misuse(); }

}  // extern "C"
