#include "engine/in_flight.h"

#include <algorithm>

#include "collectives/spec.h"
#include "engine/negotiation.h"
#include "nccl/device_operation.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::string labelled(const Operation& operation, const std::string& text) {
  const std::string label = operation.label() + ": ";
  return text.starts_with(label) ? text : label + text;
}

bool is_with_device(const Operation& operation) {
  return operation.on_device && operation.on_device->is_with_plane;
}

}  // namespace

InFlight::InFlight(const Membership& membership, Recorder& recorder, Failing& failing,
                   std::function<void()> ended)
    : membership_(membership),
      recorder_(recorder),
      failing_(failing),
      ended_(std::move(ended)),
      out_of_memory_(SPARKHVD_INTERNAL,
                     rank_text(membership.self) + " is out of memory, and its engine failed.") {}

// ---- Callers ---------------------------------------------------------------------------------

void InFlight::submit(std::shared_ptr<Operation> operation) {
  const Lock lock(mutex_);
  if (failure_) throw Error(failure_->status(), operation->label() + ": " + failure_->what());
  // If the driver has not taken the abort yet, it would announce this operation to the peers before the abort.
  if (abort_reason_) throw Error(SPARKHVD_SHUT_DOWN, operation->label() + ": " + *abort_reason_);
  const auto members = members_.find(operation->process_set);
  // The set existed when the request was checked, so it was removed since. This comes before the check of departed
  // ranks, because the set's own ranks are not known any more.
  if (members == members_.end()) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, operation->label() + ": its process set was removed.");
  }
  const bool needs_all = !spec_of(operation->descriptor.collective).is_point_to_point;
  for (const auto& [rank, kind] : losses_) {
    // After any other loss the engine fails at once, and then ends this operation with the cause.
    if (!needs_all || kind != LossKind::kLeft) continue;
    if (std::ranges::count(*members->second, rank) == 0) continue;
    throw Error(SPARKHVD_SHUT_DOWN,
                departure_text(operation->descriptor.collective, operation->name, rank));
  }
  auto& of_this_name = operations_[{operation->process_set, operation->name}];
  // A launched device operation no longer needs its name: the program may be many steps ahead of the GPU.
  if (of_this_name && !nccl::is_launched(*of_this_name)) {
    throw Error(SPARKHVD_INVALID_ARGUMENT,
                operation->label() +
                    ": an operation of this name is in flight on this rank. Wait for it, or use "
                    "another name.");
  }
  of_this_name = operation;
  recorder_.submitted(*operation);
  submitted_.push_back(std::move(operation));
}

bool InFlight::request_abort(const std::string& reason) {
  const Lock lock(mutex_);
  if (failure_) return false;
  abort_reason_ = rank_text(membership_.self) + " aborted: " + reason;
  return true;
}

void InFlight::check() const {
  if_usable([] {});
}

std::shared_ptr<const std::vector<Rank>> InFlight::members(std::int32_t process_set) const {
  const Lock lock(mutex_);
  const auto entry = members_.find(process_set);
  if (entry == members_.end()) {
    throw Error(
        SPARKHVD_INVALID_ARGUMENT,
        "process set " + std::to_string(process_set) +
            " does not exist. Add it on every rank first, and use it before it is removed.");
  }
  if (std::ranges::count(*entry->second, membership_.self) == 0) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, rank_text(membership_.self) + " is not in process set " +
                                               std::to_string(process_set) + ", which has " +
                                               rank_list(*entry->second) +
                                               ". Only its ranks may call operations on it.");
  }
  return entry->second;
}

bool InFlight::has_requests() const {
  const Lock lock(mutex_);
  return !submitted_.empty() || abort_reason_;
}

bool InFlight::is_abort_requested() const {
  const Lock lock(mutex_);
  return abort_reason_.has_value();
}

bool InFlight::is_idle() const {
  const Lock lock(mutex_);
  return operations_.empty() && !abort_reason_;
}

std::vector<Loss> InFlight::losses() const {
  const Lock lock(mutex_);
  std::vector<Loss> losses;
  for (const auto& [rank, kind] : losses_) losses.push_back({rank, kind});
  return losses;
}

// ---- The driver ------------------------------------------------------------------------------

InFlight::Requests InFlight::take() {
  const Lock lock(mutex_);
  return {std::exchange(submitted_, {}), std::exchange(abort_reason_, std::nullopt)};
}

void InFlight::announce(std::int32_t process_set, std::vector<Rank> members) {
  const Lock lock(mutex_);
  members_.insert_or_assign(process_set,
                            std::make_shared<const std::vector<Rank>>(std::move(members)));
}

void InFlight::withdraw(std::int32_t process_set) {
  const Lock lock(mutex_);
  members_.erase(process_set);
}

void InFlight::depart(Rank rank) { note({rank, LossKind::kLeft}); }

void InFlight::note(Loss loss) {
  const Lock lock(mutex_);
  losses_.try_emplace(loss.rank, loss.kind);
}

void InFlight::finish(Operation& operation, std::int32_t status, std::string message) {
  recorder_.finished(operation, status, message);
  operation.message = std::move(message);
  {
    const Lock lock(mutex_);
    const auto entry = operations_.find({operation.process_set, operation.name});
    // `kept` keeps the operation alive, because its caller may release it at its end. The entry stays if a later
    // operation has the name.
    std::shared_ptr<Operation> kept;
    if (entry != operations_.end() && entry->second.get() == &operation) {
      kept = std::move(entry->second);
      operations_.erase(entry);
    }
    operation.status.store(status, std::memory_order_release);
  }
  ended_();
}

void InFlight::finish_failed(Operation& operation) noexcept {
  try {
    const Error error = failure();
    finish(operation, error.status(), labelled(operation, error.what()));
  } catch (const std::exception&) {
    const Lock lock(mutex_);
    operation.status.store(failure_ ? failure_->status() : SPARKHVD_INTERNAL,
                           std::memory_order_release);
  }
}

void InFlight::finish_all(std::int32_t status, const std::string& message) {
  // Ends all operations in flight in any state, so that no caller waits forever.
  std::vector<std::shared_ptr<Operation>> operations;
  {
    const Lock lock(mutex_);
    failure_.emplace(status, message);
    for (const auto& [key, operation] : operations_) operations.push_back(operation);
    submitted_.clear();
  }
  for (auto& operation : operations) {
    // An operation on the device ends with the communicators, because the device may still write to its tensors.
    if (!is_with_device(*operation)) finish(*operation, status, labelled(*operation, message));
  }
}

void InFlight::fail(std::int32_t status, const std::string& message) noexcept {
  if (has_failed_) return;
  has_failed_ = true;
  try {
    failing_.spread(status, message);
  } catch (const std::exception&) {
    fail_without_memory();
  }
}

/// Ends every operation without allocating memory. The peers see closed connections.
void InFlight::fail_without_memory() noexcept {
  has_failed_ = true;
  failing_.let_go();
  {
    const Lock lock(mutex_);
    if (!failure_) failure_.emplace(std::move(out_of_memory_));
    const std::int32_t status = failure_->status();
    std::erase_if(operations_, [status](const auto& entry) {
      if (is_with_device(*entry.second)) return false;
      entry.second->status.store(status, std::memory_order_release);
      return true;
    });
    submitted_.clear();
  }
  ended_();
}

Error InFlight::failure() const {
  const Lock lock(mutex_);
  // Without a failure, only an engine that never worked calls this, at its end.
  if (!failure_)
    return {SPARKHVD_SHUT_DOWN, "the engine of " + rank_text(membership_.self) + " has ended."};
  return *failure_;
}

}  // namespace sparkhvd
