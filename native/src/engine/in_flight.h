// Unfinished operations of this rank, and the failure that stops new ones: the state shared by callers and the driver.
//
// **Threads.** Callers submit, query and abort; the driver takes, ends and fails. An Operation's result is written
// before its status.
//
// **Failure** is final: the first one counts. Any part that detects it calls `fail`, and the engine's parts are notified
// by `Failing` before any caller, so that no part writes to a tensor whose operation has ended.
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

/// Reactions of the engine's parts to a failure.
class Failing {
 public:
  virtual ~Failing() = default;
  /// Releases all tensors, ends all operations, notifies the peers.
  virtual void spread(std::int32_t status, const std::string& message) = 0;
  /// The last resort, when `spread` itself fails: releases all tensors, without allocating memory.
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

  /// Throws InvalidArgument for a name in flight, else the error that made the engine unusable.
  void submit(std::shared_ptr<Operation> operation);
  /// False if the engine has failed already.
  bool request_abort(const std::string& reason);
  /// Throws the error that made the engine unusable.
  void check() const;
  /// Runs `body` unless the engine has failed, and not while it fails. Throws the error that made it unusable.
  template <class Body>
  void if_usable(Body body) const {
    const Lock lock(mutex_);
    if (failure_) throw *failure_;
    body();
  }
  /// The ranks of a process set, ascending. Throws InvalidArgument if it does not exist or this rank
  /// is not in it.
  std::shared_ptr<const std::vector<Rank>> members(std::int32_t process_set) const;
  /// True if the driver has not taken a submission or an abort.
  bool has_requests() const;
  bool is_abort_requested() const;
  /// True if no operation is in flight, and no abort requested.
  bool is_idle() const;
  /// Lost ranks that this rank knows of, ascending.
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
  /// A rank has left gracefully: operations that need it are refused from now on.
  void depart(Rank rank);
  /// Records that a rank is lost; the first loss of a rank counts. Unless it has left, the engine fails next.
  void note(Loss loss);
  /// Ends an operation.
  void finish(Operation& operation, std::int32_t status, std::string message);
  /// Ends an operation because the engine has failed.
  void finish_failed(Operation& operation) noexcept;
  /// Ends all operations, except those whose tensors a device may still write, and accepts no more.
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
      GUARDED_BY(mutex_);  // not taken by the driver yet
  std::optional<std::string> abort_reason_ GUARDED_BY(mutex_);
  // Every unfinished operation; for launched device operations at most the last of a name.
  std::map<Key, std::shared_ptr<Operation>> operations_ GUARDED_BY(mutex_);
  std::map<std::int32_t, std::shared_ptr<const std::vector<Rank>>> members_ GUARDED_BY(mutex_);
  std::map<Rank, LossKind> losses_ GUARDED_BY(mutex_);
  std::optional<Error> failure_ GUARDED_BY(mutex_);
  Error out_of_memory_ GUARDED_BY(mutex_);  // preallocated for a lack of memory
};

}  // namespace sparkhvd
