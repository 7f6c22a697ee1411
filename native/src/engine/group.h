// A rank's state of one process set: its submitted, negotiated and running operations.
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

/// A negotiated operation that waits for its start or runs.
struct Running {
  std::shared_ptr<Operation> operation;  // null: this rank has joined and does not take part
  std::unique_ptr<Context> context;
  Task task;
  std::uint64_t sequence = 0;
  std::unique_ptr<Execute> passed_over;  // on a joined rank: the order, whose chunks it counts
  bool is_started = false;
  std::optional<OperationFailed> failure;  // set if the operation has ended with an error
  bool has_looked = false;  // removal of a process set: frames received before it are processed
  ProgressTimeout timeout;  // restarts with every step of the task
};

/// State of the process set's operations on devices, which are not in `running`.
struct OnDevices {
  std::uint64_t received = 0;
  std::uint64_t finished = 0;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  /// Total number of the set's device operations, known when the coordinator has sent its last message or has left.
  /// Their orders come from rank 0, so some may arrive later.
  std::optional<std::uint64_t> expected;

  // Used on the coordinator only:
  bool has_id = false;
  TimePoint id_deadline = kNever;  // for the creation of NCCL's unique id
  std::deque<Execute> waiting;     // orders that wait for the id
  struct Sent {
    std::string name;
    Collective collective{};
  };
  std::deque<Sent> sent;  // orders sent to rank 0 that it has not passed on yet
};

struct Group {
  Group(std::int32_t the_id, Team the_team) : id(the_id), team(std::move(the_team)) {}

  Rank coordinator() const { return team.ranks()[0]; }
  bool is_coordinator() const { return team.self() == coordinator(); }

  bool has_control_rings() const { return communicator && communicator->has_control_rings(); }

  std::int32_t id;
  Team team;
  std::optional<Communicator> communicator;  // set when the members share their memory
  std::optional<Negotiation> negotiation;    // on the coordinator only
  std::map<std::string, std::shared_ptr<Operation>> submitted;  // not negotiated yet
  TimePoint give_up_at = kNever;  // first deadline of `submitted`, or earlier
  Plan plan;
  ReadyAgain unsent;            // submissions not sent to the coordinator yet
  ExecuteAgain unsent_orders;   // on the coordinator: orders not sent to the members yet
  std::deque<Running> running;  // in the negotiated order
  std::uint64_t executes_received = 0;
  std::uint64_t executed = 0;
  OnDevices device;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  std::optional<Rank> departed;                // the first rank that has left gracefully
  bool is_closed = false;                      // the coordinator sends no more orders
  std::int32_t why_closed = SPARKHVD_OK;
  std::string closing_text;
  bool is_removed = false;  // deleted when nothing runs any more
};

/// The process sets of a rank, by id.
class Groups {
 public:
  using Map = std::map<std::int32_t, std::unique_ptr<Group>>;

  /// The process set; null if it does not exist.
  Group* find(std::int32_t id) const {
    const auto entry = groups_.find(id);
    return entry == groups_.end() ? nullptr : entry->second.get();
  }
  /// The process set; null if it does not exist, or was removed and only finishes its negotiated operations.
  Group* find_open(std::int32_t id) const {
    Group* group = find(id);
    return group == nullptr || group->is_removed ? nullptr : group;
  }
  /// True if the process set was created and is not here: it was removed, or does not include this rank.
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
  std::int32_t next_ = 1;  // next id; set 0 has all ranks
};

}  // namespace sparkhvd
