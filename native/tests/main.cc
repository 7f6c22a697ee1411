#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "test.h"
#include "watchdog.h"

// True if a test's name contains the word, or begins with it if the word starts with ^. A - before a word leaves out
// the tests that match it.
bool has_word(const std::string& name, const std::string& word) {
  return word.starts_with('^') ? name.starts_with(word.substr(1))
                               : name.find(word) != std::string::npos;
}

int main(int argc, char** argv) {
  std::vector<std::string> wanted(argv + 1, argv + argc);
  // The argument %1/2 selects every second test, from the second test on. Tests mostly wait, so two processes need
  // little more than half of the time.
  int part = 0;
  int parts = 1;
  std::erase_if(wanted, [&](const auto& word) {
    return std::sscanf(word.c_str(), "%%%d/%d", &part, &parts) == 2;
  });
  sparkhvd::test::Watchdog watchdog;
  int failed = 0;
  int run = 0;
  int number = 0;
  for (const auto& test : sparkhvd::test::cases()) {
    const bool is_wanted = wanted.empty() || std::ranges::any_of(wanted, [&](const auto& word) {
                             return has_word(test.name, word);
                           });
    const bool is_left_out = std::ranges::any_of(wanted, [&](const auto& word) {
      return word.starts_with('-') && has_word(test.name, word.substr(1));
    });
    if (!is_wanted || is_left_out || number++ % parts != part) continue;
    ++run;
    watchdog.begin(test.name);
    const auto start = std::chrono::steady_clock::now();
    std::string problem;
    try {
      test.body();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (problem.empty()) {
      std::printf("ok      %6.2f s  %s\n", seconds, test.name.c_str());
    } else {
      ++failed;
      std::printf("FAILED  %6.2f s  %s\n        %s\n", seconds, test.name.c_str(), problem.c_str());
    }
    std::fflush(stdout);
  }
  std::printf("%d of %d tests passed\n", run - failed, run);
  return failed == 0 && run > 0 ? 0 : 1;
}
