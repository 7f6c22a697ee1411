// Collectives are coroutines: straight-line code that yields where it would have to wait. The engine polls a task's
// wait condition and resumes the task when the condition holds. No task blocks its thread.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>
#include <vector>

#include "clock.h"
#include "types.h"

namespace sparkhvd {

/// A condition that a task waits for, and that other ranks fulfil.
class Condition {
 public:
  virtual bool ready() const = 0;
  /// Ranks that have not fulfilled the condition yet, for error messages.
  virtual std::vector<Rank> awaited() const = 0;
  /// Time of the last bytes on the connections that it waits for.
  virtual TimePoint moved_at() const { return {}; }

 protected:
  ~Condition() = default;
};

/// State of a chain of tasks: the innermost coroutine and its wait condition.
struct Schedule {
  const Condition* waiting = nullptr;
  std::coroutine_handle<> innermost;
};

/// A coroutine. Its first parameter must have a member `schedule`. The first `resume` starts the outermost task;
/// `co_await` starts an inner task.
class [[nodiscard]] Task {
 public:
  class promise_type {
   public:
    template <class Context, class... Arguments>
    explicit promise_type(Context& context, Arguments&&...) : schedule_(&context.schedule) {}

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept {
      struct Return {
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
          const auto caller = self.promise().caller_;
          return caller ? caller : std::noop_coroutine();
        }
        void await_resume() noexcept {}
      };
      return Return{};
    }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { error_ = std::current_exception(); }

    /// co_await of a condition: suspends the chain of tasks, unless the condition holds already.
    template <class C>
      requires std::is_base_of_v<Condition, C>
    auto await_transform(C condition) {
      struct Until {
        C condition;
        Schedule* schedule;
        bool await_ready() { return condition.ready(); }
        void await_suspend(std::coroutine_handle<> self) {
          schedule->waiting = &condition;
          schedule->innermost = self;
        }
        void await_resume() {}
      };
      return Until{condition, schedule_};
    }

    /// co_await of another task: runs it to its end.
    auto await_transform(Task&& task) {
      struct Call {
        std::coroutine_handle<promise_type> callee;
        bool await_ready() { return false; }
        std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) {
          callee.promise().caller_ = caller;
          return callee;
        }
        void await_resume() {
          if (callee.promise().error_) std::rethrow_exception(callee.promise().error_);
        }
      };
      return Call{task.handle_};
    }

   private:
    friend class Task;
    Schedule* schedule_;
    std::coroutine_handle<> caller_;
    std::exception_ptr error_;
  };

  Task() noexcept = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      if (handle_) handle_.destroy();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() {
    if (handle_) handle_.destroy();
  }

  /// Runs until the next wait condition that does not hold. True if the coroutine ran. Throws its exception.
  bool resume() {
    Schedule& schedule = *handle_.promise().schedule_;
    if (schedule.waiting != nullptr && !schedule.waiting->ready()) return false;
    const auto next = schedule.innermost ? schedule.innermost : handle_;
    schedule = {};
    next.resume();
    if (handle_.done() && handle_.promise().error_) {
      std::rethrow_exception(handle_.promise().error_);
    }
    return true;
  }
  /// True if the coroutine has ended, or there is no coroutine.
  bool done() const { return !handle_ || handle_.done(); }

 private:
  explicit Task(std::coroutine_handle<promise_type> handle) noexcept : handle_(handle) {}

  std::coroutine_handle<promise_type> handle_;
};

}  // namespace sparkhvd
