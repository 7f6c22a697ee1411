// Which operations are ready on every rank, and in which order they run. Pure on messages: no
// sockets, no clock; time is an argument. Lives on the coordinator (rank 0).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "clock.h"
#include "message.h"
#include "types.h"

namespace sparkhvd {

/// Why an operation cannot run once `departed` has left in order.
std::string departure_text(Collective collective, const std::string& name, Rank departed);

/// Message of the coordinator, and its recipients.
struct Decision {
  std::vector<Rank> to;
  std::variant<Execute, Refuse> message;
};

/// The coordinator's view of one process set.
class Negotiation {
 public:
  struct Options {
    std::int32_t process_set = 0;
    std::vector<Rank> members;
    double stall_warning_s = 0;
  };
  struct Outcome {
    std::vector<Decision> decisions;
    std::vector<std::string> warnings;
    std::vector<Rank> awaited;  // the ranks that the warnings are about, each once
  };

  explicit Negotiation(Options options) : options_(std::move(options)) {}

  /// A rank has submitted an operation.
  Outcome ready(Rank from, Ready message, TimePoint now);
  /// A rank has left in order: what needs it cannot happen any more.
  Outcome departed(Rank rank);
  /// Warnings and timeouts that are due.
  Outcome tick(TimePoint now);
  /// Number of operations on devices that have been ordered.
  std::uint64_t device_orders() const noexcept { return next_device_sequence_; }
  /// When `tick` has something to say next.
  TimePoint next_deadline() const;

 private:
  struct Pending {
    std::map<Rank, Descriptor> arrived;
    TimePoint since{};
    TimePoint deadline = kNever;
    TimePoint warn_at = kNever;
  };
  /// A refusal that some members have yet to receive, because they had not submitted.
  struct Refused {
    Refuse message;
    std::vector<Rank> unaware;
  };

  /// Ranks that have joined, and wait for the others to do so.
  struct Join {
    Join() : last{}, since{}, deadline(kNever) {}  // clang 16 finds no other one here
    std::string name;
    std::map<Rank, Descriptor> joined;
    Rank last;
    TimePoint since;
    TimePoint deadline;
  };

  Outcome join(Rank from, Ready message, TimePoint now);
  std::vector<Rank> missing(const Pending& pending) const;
  /// Missing ranks that others wait for.
  std::vector<Rank> absent(const Pending& pending) const;
  std::vector<Rank> arrived(const Pending& pending) const;
  bool is_complete(const Pending& pending) const;
  bool has_joined(Rank rank) const { return join_ && join_->joined.contains(rank); }
  void conclude(const std::string& name, const Pending& pending, TimePoint now, Outcome& outcome);
  std::optional<std::string> disagreement(const std::string& name, const Pending& pending) const;
  Execute order(const std::string& name, const Pending& pending);
  std::string check_results(const std::string& name, const Pending& pending, Execute& order) const;
  void refuse_join(std::int32_t status, const std::string& text, Outcome& outcome);
  void refuse(const std::string& name, const Pending& pending, std::int32_t status,
              std::string text, Outcome& outcome);

  Options options_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_device_sequence_ = 0;  // operations on devices are numbered by themselves
  std::map<std::string, Pending> pending_;
  std::multimap<std::string, Refused> refused_;
  std::optional<Join> join_;
  std::vector<Rank> departed_;
};

}  // namespace sparkhvd
