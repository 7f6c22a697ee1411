// A rank's state of one process set: submitted, negotiated and running operations.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/collectives.h"
#include "communicator.h"
#include "engine/negotiation.h"
#include "engine/plan.h"
#include "error.h"
#include "operation.h"

namespace sparkhvd {

/// A negotiated operation.
struct Running {
  std::shared_ptr<Operation> operation;  // null: this rank has joined and only counts
  std::unique_ptr<Context> context;
  Task task;
  std::uint64_t sequence = 0;
  std::unique_ptr<Execute> passed_over;  // the order that a joined rank counts
  bool is_started = false;
  std::optional<OperationFailed> failure;  // then it has ended
  bool has_looked = false;  // removal of a process set: has processed its received frames
  ProgressTimeout timeout;  // restarts with every step
};

/// Negotiated operations on the ranks' devices, beside `running`.
struct OnDevices {
  std::uint64_t received = 0;
  std::uint64_t finished = 0;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  /// Number of operations, after the coordinator has sent its last message or has left: rank 0 passes them
  /// on, so they may arrive later.
  std::optional<std::uint64_t> expected;

  // The coordinator's.
  bool has_id = false;
  TimePoint id_deadline = kNever;  // of the creation of the communicator's id
  std::deque<Execute> waiting;     // for the id
  struct Sent {
    std::string name;
    Collective collective{};
  };
  std::deque<Sent> sent;  // to rank 0, which has not passed them on yet
};

struct Group {
  Group(std::int32_t the_id, Team the_team) : id(the_id), team(std::move(the_team)) {}

  Rank coordinator() const { return team.ranks()[0]; }
  bool is_coordinator() const { return team.self() == coordinator(); }

  bool has_control_rings() const { return communicator && communicator->has_control_rings(); }

  std::int32_t id;
  Team team;
  std::optional<Communicator> communicator;  // after the members share their memory
  std::optional<Negotiation> negotiation;    // on the coordinator
  std::map<std::string, std::shared_ptr<Operation>> submitted;  // not negotiated yet
  TimePoint give_up_at = kNever;                                // of these, or earlier
  Plan plan;
  ReadyAgain unsent;            // submitted, and not sent to the coordinator yet
  ExecuteAgain unsent_orders;   // the coordinator's: decided, and not sent to the members yet
  std::deque<Running> running;  // in the negotiated order
  std::uint64_t executes_received = 0;
  std::uint64_t executed = 0;
  OnDevices device;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  std::optional<Rank> departed;                // the first that has left gracefully
  bool is_closed = false;                      // the coordinator orders nothing more, and why
  std::int32_t why_closed = SPARKHVD_OK;
  std::string closing_text;
  bool is_removed = false;  // deleted when nothing runs any more
};

/// The process sets of a rank, by number.
class Groups {
 public:
  using Map = std::map<std::int32_t, std::unique_ptr<Group>>;

  /// Null if it does not exist.
  Group* find(std::int32_t id) const {
    const auto entry = groups_.find(id);
    return entry == groups_.end() ? nullptr : entry->second.get();
  }
  /// The same; null also if it was removed, and only finishes negotiated operations.
  Group* find_open(std::int32_t id) const {
    Group* group = find(id);
    return group == nullptr || group->is_removed ? nullptr : group;
  }
  /// True if it was created, with or without this rank, and removed.
  bool is_gone(std::int32_t id) const { return id < next_ && !groups_.contains(id); }
  bool was_made(std::int32_t id) const { return id < next_; }
  std::int32_t take_number() { return next_++; }
  Group& add(std::unique_ptr<Group> group) {
    const std::int32_t id = group->id;
    return *groups_.insert_or_assign(id, std::move(group)).first->second;
  }
  Map::iterator erase(Map::iterator entry) { return groups_.erase(entry); }

  Map::iterator begin() { return groups_.begin(); }
  Map::iterator end() { return groups_.end(); }
  Map::const_iterator begin() const { return groups_.begin(); }
  Map::const_iterator end() const { return groups_.end(); }

 private:
  Map groups_;
  std::int32_t next_ = 1;  // 0 has all ranks
};

}  // namespace sparkhvd
