// Negotiation: the coordinator (the set's first rank) finds the operations that are ready on every rank, and decides
// their order. The class has no sockets and no clock: messages and times are arguments.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "clock.h"
#include "message.h"
#include "types.h"

namespace sparkhvd {

/// The error of an operation after `departed` has left gracefully.
std::string departure_text(Collective collective, const std::string& name, Rank departed);

/// An order to run an operation of the plan.
struct Again {
  std::uint32_t number = 0;
  std::uint64_t sequence = 0;
};

/// A message of the coordinator with its recipients.
struct Decision {
  std::vector<Rank> to;
  std::variant<Execute, Again, Refuse> message;
};

/// The coordinator's state of the negotiation of one process set.
///
/// **Plan.** An operation that every rank has submitted twice in a row with the same description gets a number with its
/// order. From then on a rank that submits it unchanged sends only the number. If all ranks send the number, the order
/// is also only the number, and the coordinator compares and computes nothing again. A rank that submits something else
/// under the name sends its description. The coordinator compares it with the descriptions of the other ranks.
class Negotiation {
 public:
  /// Largest count of operations with numbers. Ranks describe all other operations each time.
  static constexpr std::size_t kMaxPlanned = 4096;

  struct Options {
    std::int32_t process_set = 0;
    std::vector<Rank> members;
    double stall_warning_s = 0;
  };
  struct Outcome {
    std::vector<Decision> decisions;
    std::vector<std::string> warnings;
    std::vector<Rank> awaited;  // the ranks that the warnings name, without duplicates
  };

  explicit Negotiation(Options options) : options_(std::move(options)) {}

  /// Handles a rank's submission of an operation.
  Outcome ready(Rank from, Ready message, TimePoint now);
  /// Handles a rank's submission of operation `number` of the plan. Throws Error if the number does not exist.
  Outcome ready_again(Rank from, std::uint32_t number, TimePoint now);
  /// Handles a rank that has left gracefully: refuses the operations that need it.
  Outcome departed(Rank rank);
  /// Returns the warnings and timeouts that are due at `now`.
  Outcome tick(TimePoint now);
  /// Number of operations on devices that the coordinator has ordered.
  std::uint64_t device_orders() const noexcept { return next_device_sequence_; }
  /// Next time at which `tick` may report something.
  TimePoint next_deadline() const noexcept { return next_tick_; }

 private:
  using Arrived = std::vector<std::shared_ptr<const Descriptor>>;  // by member; null: not submitted
  struct Pending {
    Arrived arrived;
    std::size_t num_arrived = 0;
    std::size_t num_planned = 0;          // submissions that came as a number
    std::optional<std::uint32_t> number;  // the number, if a submission came as a number
    TimePoint since{};
    TimePoint deadline = kNever;
    TimePoint warn_at = kNever;
  };
  /// An operation of the plan, with the description that each rank has submitted.
  struct Planned {
    std::string name;
    Arrived descriptors;
    Pending* pending = nullptr;
  };
  /// The last operation with a name.
  struct Seen {
    std::uint64_t digest = 0;  // digest of all ranks' descriptions
    std::optional<std::uint32_t> number;
  };
  /// A refused operation, and the members that had not submitted it. Each gets the refusal when it submits.
  struct Refused {
    Refuse message;
    std::vector<Rank> unaware;
  };

  /// Ranks that have joined and wait for the other ranks.
  struct Join {
    Join() : last{}, since{}, deadline(kNever) {}  // clang 16 finds no implicit constructor here
    std::string name;
    std::map<Rank, Descriptor> joined;
    Rank last;
    TimePoint since;
    TimePoint deadline;
  };

  Outcome join(Rank from, Ready message, TimePoint now);
  /// Removes and returns the refusal that waits for a late rank, if any.
  std::optional<Outcome> take_refusal(Rank from, const std::string& name);
  Outcome arrive(Rank from, Pending& pending, const std::string& name,
                 std::shared_ptr<const Descriptor> descriptor, TimePoint now);
  Pending take(const std::string& name);
  std::size_t member_index(Rank rank) const;
  std::optional<std::uint32_t> plan(const std::string& name, const Pending& pending);
  std::vector<Rank> missing(const Pending& pending) const;
  /// Ranks that have neither submitted the operation nor joined.
  std::vector<Rank> absent(const Pending& pending) const;
  std::vector<Rank> arrived(const Pending& pending) const;
  bool is_complete(const Pending& pending) const;
  bool has_joined(Rank rank) const { return join_ && join_->joined.contains(rank); }
  void conclude(const std::string& name, const Pending& pending, TimePoint now, Outcome& outcome);
  std::optional<std::string> disagreement(const std::string& name, const Pending& pending) const;
  Execute order(const std::string& name, const Pending& pending);
  std::string check_results(const std::string& name, const Pending& pending, Execute& order) const;
  void wait_longer_for_joins(TimePoint now);
  void refuse_join(std::int32_t status, const std::string& text, Outcome& outcome);
  void refuse(const std::string& name, const Pending& pending, std::int32_t status,
              std::string text, Outcome& outcome);

  Options options_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_device_sequence_ = 0;  // operations on devices are numbered separately
  std::map<std::string, Pending> pending_;
  std::vector<Planned> planned_;  // by number
  std::unordered_map<std::string, Seen> seen_;
  TimePoint next_tick_ = kNever;  // not later than the next warning or timeout
  std::multimap<std::string, Refused> refused_;
  std::optional<Join> join_;
  std::vector<Rank> departed_;
};

}  // namespace sparkhvd
