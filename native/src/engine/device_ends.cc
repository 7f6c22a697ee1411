// Events of the device, and the ends of its operations after a success, a failure or the departure of a rank (see
// device_orders.h).
#include <algorithm>

#include "engine/device_orders.h"
#include "engine/negotiation.h"
#include "text.h"

namespace sparkhvd {
namespace {

// If NCCL blames a peer for a failure, this rank waits for the cause for this time: a leaving rank sends its goodbye
// before it ends its communicators, and a process that ends closes its connections. The message then names the rank.
constexpr auto kNamingTime = std::chrono::seconds(1);
// Time to end the communicator of a set that a rank has left: see kDepartureTime in nccl/plane_end.cc.
constexpr auto kMarkedTime = std::chrono::seconds(4);

}  // namespace

// ---- From the device -------------------------------------------------------------------------

bool DeviceOrders::hear() {
  auto* open = plane();
  if (open == nullptr) return false;
  bool moved = false;
  if (open->has_news()) {
    moved = true;
    nccl::News news = open->take_news();
    for (const auto& made : news.ids) {
      if (!in_flight_.has_failed()) on_unique_id(made.process_set, made.id);
    }
    for (const auto& done : news.done) on_done(done);
    for (const auto& broken : news.broken) {
      if (!in_flight_.has_failed()) on_broken(broken);
    }
    if (news.failure && !in_flight_.has_failed() && !failure_) {
      const bool blames_a_peer = news.failure->status() == SPARKHVD_PEER_LOST;
      const auto patience = blames_a_peer ? kNamingTime : Clock::duration::zero();
      failure_ = DeviceFailure{*news.failure, Clock::now() + patience};
    }
    if (news.is_aborted) end_on_plane(news.is_busy);
    hooks_.launched();
  }
  if (const auto now = Clock::now(); now >= next_deadline()) {
    check_time(now);
    moved = true;
  }
  return moved;
}

TimePoint DeviceOrders::next_deadline() const {
  if (in_flight_.has_failed()) return on_plane_.empty() ? kNever : abort_deadline_;
  TimePoint next = marked_deadline_;
  if (failure_) next = std::min(next, failure_->at);
  for (const auto& [id, failure] : broken_) next = std::min(next, failure.at);
  if (!on_plane_.empty()) {
    next = std::min({next, on_plane_.front().deadline, on_plane_.front().warn_at});
  }
  if (plane() == nullptr) return next;
  for (const auto& [id, group] : groups_) next = std::min(next, group->device.id_deadline);
  return next;
}

void DeviceOrders::check_time(TimePoint now) {
  if (in_flight_.has_failed()) return end_on_plane(true);
  const auto fail_by = [&](const DeviceFailure& failure) {
    in_flight_.fail(failure.error.status(), "NCCL on " + rank_text(options_.rank) + ": " +
                                                without_stop(failure.error.what()) +
                                                ". Start the engine again.");
  };
  if (failure_ && now >= failure_->at) return fail_by(*failure_);
  for (const auto& [id, failure] : broken_) {
    if (now >= failure.at) return fail_by(failure);
  }
  const char* where = plane()->whereabouts();
  if (!on_plane_.empty() && now >= on_plane_.front().deadline) {
    const OnPlane& first = on_plane_.front();
    return in_flight_.fail(SPARKHVD_TIMEOUT,
                           first.label + ": " + rank_text(options_.rank) + " waited " +
                               seconds_text(first.timeout_s) + " s for " + where +
                               ". A process may be stopped, or a GPU or the network "
                               "between GPUs hangs.");
  }
  if (!on_plane_.empty() && now >= on_plane_.front().warn_at) warn_of_stall(now);
  if (now >= marked_deadline_) {
    return in_flight_.fail(
        SPARKHVD_SHUT_DOWN,
        rank_text(options_.rank) +
            " could not end its NCCL communicator with a rank that shut down. Call "
            "shutdown() on a rank only after its last operation.");
  }
  for (const auto& [id, group] : groups_) {
    if (now < group->device.id_deadline) continue;
    const std::string name =
        group->device.waiting.empty() ? "" : group->device.waiting.front().name;
    return in_flight_.fail(SPARKHVD_TIMEOUT,
                           "operation '" + name + "' on the device: " + rank_text(options_.rank) +
                               " waited in vain for " + where + ", which creates a communicator.");
  }
}

/// Starts the time limit of the first operation, because the device runs it now.
void DeviceOrders::watch_first() {
  OnPlane& first = on_plane_.front();
  first.since = Clock::now();
  first.deadline = deadline_after(first.since, first.timeout_s);
  first.warn_at = deadline_after(first.since, options_.stall_warning_s);
}

void DeviceOrders::warn_of_stall(TimePoint now) {
  OnPlane& first = on_plane_.front();
  first.warn_at = deadline_after(now, options_.stall_warning_s);
  const double waited = std::chrono::duration<double>(now - first.since).count();
  const std::string set =
      first.process_set == 0 ? "" : " of process set " + std::to_string(first.process_set);
  warn(first.label + set + ": " + rank_text(options_.rank) + " is waiting for " +
       plane()->whereabouts() + " since " + seconds_text(waited) +
       " s, after all ranks submitted it; later operations wait too. A process may be "
       "stopped, or a GPU or the network between GPUs hangs.");
  recorder_.activity().stall_warnings.add();
}

void DeviceOrders::on_done(const nccl::News::Done& done) {
  const auto entry = std::ranges::find_if(on_plane_, [&](const OnPlane& one) {
    return one.process_set == done.process_set && one.sequence == done.sequence;
  });
  if (entry == on_plane_.end()) return;  // a deadline has ended it
  const auto operation = entry->operation;
  const bool was_first = entry == on_plane_.begin();
  on_plane_.erase(entry);
  if (was_first && !on_plane_.empty()) watch_first();
  Group* group = groups_.find(done.process_set);
  const bool is_left = group != nullptr && (done.sequence >= group->device.departure_limit ||
                                            done.status == SPARKHVD_SHUT_DOWN);
  if (group != nullptr && !is_left) ++group->device.finished;
  if (marked_deadline_ != kNever) {
    const bool has_more = std::ranges::any_of(on_plane_, [&](const OnPlane& one) {
      const Group* its = groups_.find(one.process_set);
      return its != nullptr && one.sequence >= its->device.departure_limit;
    });
    if (!has_more) marked_deadline_ = kNever;
  }
  if (!operation) return;
  operation->on_device->is_with_plane = false;
  if (in_flight_.has_failed()) {
    in_flight_.finish_failed(*operation);
  } else if (is_left && group->departed) {
    in_flight_.finish(
        *operation, SPARKHVD_SHUT_DOWN,
        departure_text(operation->descriptor.collective, operation->name, *group->departed));
  } else {
    const bool ok = done.status == SPARKHVD_OK;
    in_flight_.finish(*operation, done.status,
                      ok ? std::string() : operation->label() + ": " + done.message);
  }
}

// ---- Endings ---------------------------------------------------------------------------------

void DeviceOrders::abort() {
  auto* open = plane();
  if (open == nullptr) return;
  if (abort_deadline_ == kNever) abort_deadline_ = Clock::now() + nccl::kAbortTime;
  open->abort();
}

/// Ends all operations of the plane with the engine's error, after the communicators have ended or timed out.
void DeviceOrders::end_on_plane(bool is_device_busy) noexcept {
  for (; !on_plane_.empty(); on_plane_.pop_front()) {
    const auto& operation = on_plane_.front().operation;
    if (!operation) continue;
    operation->on_device->is_with_plane = false;
    operation->on_device->is_left_to_device = is_device_busy;
    in_flight_.finish_failed(*operation);
  }
}

/// At shutdown: afterwards the plane has stopped, and every operation has ended.
void DeviceOrders::stop() {
  abort();
  auto* open = plane();
  if (open == nullptr) return;
  const bool has_stopped = open->stop(abort_deadline_);
  if (!has_stopped) {
    warn("NCCL or CUDA on " + rank_text(options_.rank) +
         " does not come back (it is in: " + open->whereabouts() + "); its thread is left behind.");
  }
  end_on_plane(!has_stopped || (open->has_news() && open->take_news().is_busy));
}

/// Handles a rank that has left. Operations that it has finished finish here on their own; later operations must be
/// ended.
void DeviceOrders::depart(Group& group, Rank rank, std::uint64_t executed) {
  OnDevices& orders = group.device;
  if (!group.departed) group.departed = rank;
  orders.departure_limit = std::min(orders.departure_limit, executed);
  // If the goodbye does not mention the set (UINT64_MAX), the coordinator has already sent the set's last message.
  if (rank == group.coordinator() && !orders.expected && executed != UINT64_MAX) {
    orders.expected = std::max(executed, orders.received);
  }
  mark_for_abort(group);
}

/// Handles a broken communicator: NCCL has noticed the loss of a rank before its connection closed.
void DeviceOrders::on_broken(const nccl::News::Broken& broken) {
  Group* group = groups_.find(broken.process_set);
  if (group == nullptr) return;  // removed: it has no pending operation
  broken_.insert_or_assign(broken.process_set,
                           DeviceFailure{broken.error, Clock::now() + kNamingTime});
  if (group->departed) mark_for_abort(*group);
}

/// Ends device operations of a process set that a rank has left, if they cannot finish on their own.
void DeviceOrders::mark_for_abort(Group& group) {
  OnDevices& orders = group.device;
  const bool is_broken = broken_.erase(group.id) > 0;
  for (const OnPlane& one : on_plane_) {
    // In a broken communicator even operations that the departing rank has finished cannot finish here.
    if (is_broken && one.process_set == group.id) {
      orders.departure_limit = std::min(orders.departure_limit, one.sequence);
    }
  }
  const bool has_some = std::ranges::any_of(on_plane_, [&](const OnPlane& one) {
    return one.process_set == group.id && one.sequence >= orders.departure_limit;
  });
  if (!has_some) return;
  marked_deadline_ = std::min(marked_deadline_, Clock::now() + kMarkedTime);
  plane()->mark_for_abort(group.id, orders.departure_limit);
}

/// Rank 0 has left, and passes on no more orders.
void DeviceOrders::on_relay_end() {
  for (auto& [id, group] : groups_) {
    if (group->is_coordinator()) refuse_orders(*group);
    hooks_.settle(*group);
  }
}

bool DeviceOrders::may_be_ordered(const Group& group, const Operation& operation) const {
  return operation.on_device && group.device.expected &&
         group.device.received < *group.device.expected && !peers_.has_left(Rank{0});
}

bool DeviceOrders::is_done(const Group& group) const {
  const OnDevices& orders = group.device;
  const bool may_come =
      orders.expected && orders.received < *orders.expected && !peers_.has_left(Rank{0});
  return !may_come && std::ranges::none_of(on_plane_, [&](const OnPlane& one) {
    return one.process_set == group.id;
  });
}

void DeviceOrders::remove(const Group& group) {
  if (auto* open = plane()) open->remove(group.id);
  broken_.erase(group.id);
}

}  // namespace sparkhvd
