// A small test framework: `TEST(name) { CHECK(condition); }`. The executable runs the tests with a name that contains
// one of its arguments (without arguments: all tests) and fails if a test fails.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace sparkhvd::test {

struct Case {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check(bool ok, const char* file, int line, const char* condition,
                  const std::string& message = {}) {
  if (ok) return;
  std::ostringstream text;
  text << file << ":" << line << ": CHECK(" << condition << ") failed";
  if (!message.empty()) text << ": " << message;
  throw Failure(text.str());
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* file, int line, const char* condition) {
  if (a == b) return;
  std::ostringstream text;
  text << "left is \"" << a << "\", right is \"" << b << "\"";
  check(false, file, line, condition, text.str());
}

template <class Exception, class Body>
void check_throws(Body body, const char* file, int line, const char* condition) {
  try {
    body();
  } catch (const Exception&) {
    return;
  }
  check(false, file, line, condition, "nothing was thrown");
}

}  // namespace sparkhvd::test

#define TEST(name)                                                                  \
  static void test_##name();                                                        \
  static const ::sparkhvd::test::Registration register_##name(#name, &test_##name); \
  static void test_##name()
#define CHECK(...) \
  ::sparkhvd::test::check(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
#define CHECK_MESSAGE(condition, message) \
  ::sparkhvd::test::check(static_cast<bool>(condition), __FILE__, __LINE__, #condition, message)
#define CHECK_EQUAL(a, b) ::sparkhvd::test::check_equal(a, b, __FILE__, __LINE__, #a " == " #b)
#define CHECK_THROWS(exception, ...)                                                          \
  ::sparkhvd::test::check_throws<exception>([&] { (void)(__VA_ARGS__); }, __FILE__, __LINE__, \
                                            #__VA_ARGS__)
