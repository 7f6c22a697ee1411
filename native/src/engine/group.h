// One process set as a rank of it sees it: what was submitted, what is agreed on, what runs.
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

/// An operation that all ranks have agreed to run.
struct Running {
  std::shared_ptr<Operation> operation;  // null: this rank has joined and only counts along
  std::unique_ptr<Context> context;
  Task task;
  std::uint64_t sequence = 0;
  std::unique_ptr<Execute> passed_over;  // what a rank that has joined counts along with
  bool is_started = false;
  std::optional<OperationFailed> failure;  // then it has ended
  bool has_looked = false;  // removal of a process set: at everything that has come for it
  ProgressTimeout timeout;  // begins anew with every step
};

/// Operations that a process set has agreed to run on its ranks' devices, beside `running`.
struct OnDevices {
  std::uint64_t received = 0;
  std::uint64_t finished = 0;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  /// So many come, once the coordinator has said its last word or has left: rank 0 passes them on,
  /// so they may come after it.
  std::optional<std::uint64_t> expected;

  // The coordinator's.
  bool has_id = false;
  TimePoint id_deadline = kNever;  // of what makes the communicator's id
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
  std::optional<Communicator> communicator;  // once the members share what memory they can
  std::optional<Negotiation> negotiation;    // on the coordinator
  std::map<std::string, std::shared_ptr<Operation>> submitted;  // not agreed on yet
  TimePoint give_up_at = kNever;                                // of these, or earlier
  Plan plan;
  ReadyAgain untold;            // submitted, and the coordinator has yet to be told
  ExecuteAgain untold_orders;   // the coordinator's: decided, and the members have yet to be told
  std::deque<Running> running;  // in the agreed order
  std::uint64_t executes_received = 0;
  std::uint64_t executed = 0;
  OnDevices device;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  std::optional<Rank> departed;                // the first that has left in order
  bool is_closed = false;                      // the coordinator orders nothing more, and why
  std::int32_t why_closed = SPARKHVD_OK;
  std::string closing_text;
  bool is_removed = false;  // goes when nothing runs any more
};

/// The process sets that a rank is in, by number.
class Groups {
 public:
  using Map = std::map<std::int32_t, std::unique_ptr<Group>>;

  /// Null if there is none.
  Group* find(std::int32_t id) const {
    const auto entry = groups_.find(id);
    return entry == groups_.end() ? nullptr : entry->second.get();
  }
  /// The same; null also if it was removed, and only finishes what was agreed on.
  Group* find_open(std::int32_t id) const {
    Group* group = find(id);
    return group == nullptr || group->is_removed ? nullptr : group;
  }
  /// True if it was made, whether this rank is in it or not, and is no more.
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
