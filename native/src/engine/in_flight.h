// Operations of this rank that have not ended, and why no more are taken: what callers and the driver share.
//
// **Threads.** Callers submit, ask and abort; the driver takes, ends and fails. An Operation's result is written
// before its status is.
//
// **Failure** is final: the first one counts. Whoever notices it calls `fail`, and the engine's parts hear of it
// by `Failing` before any caller does, so that nothing writes to a tensor whose operation has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "error.h"
#include "membership.h"
#include "operation.h"
#include "recorder.h"
#include "sync.h"
#include "types.h"

namespace sparkhvd {

/// What the engine's parts do when it fails.
class Failing {
 public:
  virtual ~Failing() = default;
  /// Lets go of all tensors, ends all operations, tells the peers.
  virtual void spread(std::int32_t status, const std::string& message) = 0;
  /// The last resort, when `spread` itself fails: lets go of all tensors, without a new byte of memory.
  virtual void let_go() noexcept = 0;
};

class InFlight {
 public:
  /// `ended` is called after an operation has ended, by the driver.
  InFlight(const Membership& membership, Recorder& recorder, Failing& failing,
           std::function<void()> ended);
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Any thread.

  /// Throws InvalidArgument for a name in flight, else what made the engine unusable.
  void submit(std::shared_ptr<Operation> operation);
  /// False if the engine has failed already.
  bool request_abort(const std::string& reason);
  /// Throws why the engine is not usable.
  void check() const;
  /// Runs `body` unless the engine has failed, and not while it fails. Throws why it is not usable.
  template <class Body>
  void if_usable(Body body) const {
    const Lock lock(mutex_);
    if (failure_) throw *failure_;
    body();
  }
  /// The ranks of a process set, ascending. Throws InvalidArgument if it does not exist or this rank
  /// is not in it.
  std::shared_ptr<const std::vector<Rank>> members(std::int32_t process_set) const;
  /// True if something was submitted, or an abort asked for, that the driver has not taken.
  bool has_requests() const;
  bool is_abort_requested() const;
  /// True if no operation is in flight, and no abort asked for.
  bool is_idle() const;
  /// Ranks that are lost, ascending, as far as this rank knows.
  std::vector<Loss> losses() const;

  // The driver's.

  struct Requests {
    std::vector<std::shared_ptr<Operation>> operations;
    std::optional<std::string> abort_reason;
    bool empty() const noexcept { return operations.empty() && !abort_reason; }
  };
  Requests take();
  void announce(std::int32_t process_set, std::vector<Rank> members);
  void withdraw(std::int32_t process_set);
  /// A rank has left in order: operations that need it are refused from now on.
  void depart(Rank rank);
  /// Notes that a rank is lost; the first loss of a rank counts. Unless it has left, the engine fails next.
  void note(Loss loss);
  /// Ends an operation.
  void finish(Operation& operation, std::int32_t status, std::string message);
  /// Ends an operation because the engine has failed.
  void finish_failed(Operation& operation) noexcept;
  /// Ends all, but for those that a device may still write to, and takes no more.
  void finish_all(std::int32_t status, const std::string& message);
  /// Fails the engine, unless it has failed.
  void fail(std::int32_t status, const std::string& message) noexcept;
  void fail_without_memory() noexcept;
  bool has_failed() const noexcept { return has_failed_; }

 private:
  using Key = std::pair<std::int32_t, std::string>;  // process set, name

  Error failure() const;

  const Membership& membership_;
  Recorder& recorder_;
  Failing& failing_;
  const std::function<void()> ended_;
  bool has_failed_ = false;  // the driver's

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Operation>> submitted_
      GUARDED_BY(mutex_);  // the driver has yet to take
  std::optional<std::string> abort_reason_ GUARDED_BY(mutex_);
  // Every operation that is not finished; but of those that the device has been given, at most the last of
  // a name.
  std::map<Key, std::shared_ptr<Operation>> operations_ GUARDED_BY(mutex_);
  std::map<std::int32_t, std::shared_ptr<const std::vector<Rank>>> members_ GUARDED_BY(mutex_);
  std::map<Rank, LossKind> losses_ GUARDED_BY(mutex_);
  std::optional<Error> failure_ GUARDED_BY(mutex_);
  Error out_of_memory_ GUARDED_BY(mutex_);  // there when nothing can be made any more
};

}  // namespace sparkhvd
