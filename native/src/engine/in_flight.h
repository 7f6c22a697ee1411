// State shared by callers and the driver: the unfinished operations of this rank, and the engine's failure.
//
// **Threads.** Callers submit operations, query and abort; the driver takes submissions, ends operations and fails the
// engine. The driver writes an operation's result before its status.
//
// **Failure** is final: after the first failure further failures are ignored. The part that detects it calls `fail`.
// `Failing` then notifies all parts before any caller, so that no part writes to a tensor after its operation has
// ended.
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

/// Interface through which a failure reaches the engine's parts.
class Failing {
 public:
  virtual ~Failing() = default;
  /// Releases all tensors, ends all operations, notifies the peers.
  virtual void spread(std::int32_t status, const std::string& message) = 0;
  /// Releases all tensors without allocating memory; called when `spread` itself fails.
  virtual void let_go() noexcept = 0;
};

class InFlight {
 public:
  /// The driver calls `ended` after an operation has ended.
  InFlight(const Membership& membership, Recorder& recorder, Failing& failing,
           std::function<void()> ended);
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Any thread.

  /// Submits an operation. Throws InvalidArgument for a name in flight, or the error that made the engine unusable.
  void submit(std::shared_ptr<Operation> operation);
  /// False if the engine has failed already.
  bool request_abort(const std::string& reason);
  /// Throws the error that made the engine unusable.
  void check() const;
  /// Runs `body` under the lock, so the engine cannot fail meanwhile. Throws the error that made the engine unusable.
  template <class Body>
  void if_usable(Body body) const {
    const Lock lock(mutex_);
    if (failure_) throw *failure_;
    body();
  }
  /// The ranks of a process set, ascending. Throws InvalidArgument if the set does not exist or does not have this
  /// rank.
  std::shared_ptr<const std::vector<Rank>> members(std::int32_t process_set) const;
  /// True if a submission or an abort waits for the driver.
  bool has_requests() const;
  bool is_abort_requested() const;
  /// True if no operation is in flight and no abort is requested.
  bool is_idle() const;
  /// Lost ranks that this rank knows, ascending.
  std::vector<Loss> losses() const;

  // Only the driver's thread.

  struct Requests {
    std::vector<std::shared_ptr<Operation>> operations;
    std::optional<std::string> abort_reason;
    bool empty() const noexcept { return operations.empty() && !abort_reason; }
  };
  Requests take();
  void announce(std::int32_t process_set, std::vector<Rank> members);
  void withdraw(std::int32_t process_set);
  /// Records that a rank has left gracefully. `submit` refuses operations that need it from now on.
  void depart(Rank rank);
  /// Records that a rank is lost; later losses of the same rank are ignored. Unless the rank has left gracefully, the
  /// caller fails the engine next.
  void note(Loss loss);
  /// Ends an operation.
  void finish(Operation& operation, std::int32_t status, std::string message);
  /// Ends an operation because the engine has failed.
  void finish_failed(Operation& operation) noexcept;
  /// Ends all operations and accepts no more. Operations on a device stay, because it may still write to their tensors.
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
  bool has_failed_ = false;  // only the driver's thread uses it

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Operation>> submitted_
      GUARDED_BY(mutex_);  // not taken by the driver yet
  std::optional<std::string> abort_reason_ GUARDED_BY(mutex_);
  // Every unfinished operation, except a launched device operation with a name that is in use again.
  std::map<Key, std::shared_ptr<Operation>> operations_ GUARDED_BY(mutex_);
  std::map<std::int32_t, std::shared_ptr<const std::vector<Rank>>> members_ GUARDED_BY(mutex_);
  std::map<Rank, LossKind> losses_ GUARDED_BY(mutex_);
  std::optional<Error> failure_ GUARDED_BY(mutex_);
  Error out_of_memory_ GUARDED_BY(mutex_);  // allocated early, for a failure without memory
};

}  // namespace sparkhvd
