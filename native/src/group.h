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
#include "error.h"
#include "negotiation.h"
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
  bool has_looked = false;      // removal of a process set: at everything that has come for it
  TimePoint deadline = kNever;  // moves on with every step
};

/// Operations that a process set has agreed to run on its ranks' devices, beside `running`.
struct DeviceOrders {
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
  std::deque<Running> running;                                  // in the agreed order
  std::uint64_t executes_received = 0;
  std::uint64_t executed = 0;
  DeviceOrders device;
  std::uint64_t departure_limit = UINT64_MAX;  // operations from this number on cannot run
  std::optional<Rank> departed;                // the first that has left in order
  bool is_closed = false;                      // the coordinator orders nothing more, and why
  std::int32_t why_closed = SPARKHVD_OK;
  std::string closing_text;
  bool is_removed = false;  // goes when nothing runs any more
};

}  // namespace sparkhvd
