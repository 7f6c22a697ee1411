// One row per collective in a table: what its callers give, what its ranks must agree on, how it runs. Each file of
// this folder that holds a collective ends with its row; the engine asks the table and knows no collective by name.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "message.h"
#include "task.h"
#include "types.h"

namespace sparkhvd {

struct Context;
class Team;

namespace nccl {
class Calls;
}

/// Where the results are.
enum class Result : std::uint8_t {
  kNone,
  kSameShape,  // the caller's, each as large as its input
  kInPlace,    // where the inputs are
  kOwnRows,    // the caller's, each with this rank's rows of its input
  kOfRoot,     // as kSameShape, on the root alone
  kReceived,   // the caller's; there is no input
  kAgreed,     // as large as the order says: the engine's, or the caller's if it has room
};

/// A submission, seen by the check of its numbers.
struct Submitted {
  Descriptor& descriptor;
  std::int32_t process_set;
  std::span<const Rank> members;
  Rank self;
  std::size_t world_size;
  std::uint64_t slot_bytes;
  std::uint32_t streams;
  bool has_numbers;  // false: the caller gave none, not even an empty list
  std::string label;

  /// Throws InvalidArgument.
  [[noreturn]] void refuse(const std::string& text) const;
};

/// An order as one rank has received it.
struct Received {
  const Descriptor& descriptor;
  const Execute& order;
  const Team& team;
};

struct CollectiveSpec {
  Collective collective{};
  std::uint32_t min_tensors = 0;
  std::uint32_t max_tensors = 0;  // 0: it has no tensors and no dtype
  bool reduces = false;
  bool has_root = false;
  /// From one rank to another, whom `root` names; nobody else agrees on it.
  bool is_point_to_point = false;
  Result result = Result::kNone;
  /// The first dimension of its tensors is divided, so they have one.
  bool divides_rows = false;
  /// Tensors of two ranks may differ in their first dimension.
  bool is_uneven = false;
  /// Ranks that have joined count as zeros where the reduction is a sum; else it needs every rank.
  bool goes_on_without_joined = false;
  /// The numbers that every rank brings equally, in words; null if each brings its own.
  const char* same_numbers = "the tensors of the group (by a digest of all of them)";
  /// Checks and completes the numbers of a submission. Throws by Submitted::refuse.
  void (*check)(const Submitted&) = nullptr;
  /// The rows or splits of an order, from every rank's description in the order of the ranks. Throws Error.
  void (*write_rows)(std::span<const Descriptor* const> by_member, Execute& order) = nullptr;
  /// How many numbers that are for one rank, and for rank 0, which passes on orders for devices.
  std::size_t (*count_rows)(const Descriptor&, std::size_t members) = nullptr;
  /// True if the rows of an order can be. They become sizes of memory.
  bool (*are_rows_possible)(const Received&) = nullptr;
  /// kAgreed: rows of the result of a tensor on one member, by the whole order.
  std::int64_t (*rows_of_result)(const Descriptor&, const Execute& order, std::size_t tensor,
                                 std::span<const Rank> members, std::size_t member) = nullptr;
  /// Null: the engine's own doing, or nothing at all.
  Task (*run)(Context&) = nullptr;
  /// Of counters and timelines where NCCL runs it; empty if no device does.
  const char* device_algorithm = "";
  /// Enqueues the calls for one tensor.
  void (*enqueue)(const nccl::Calls&, std::size_t tensor) = nullptr;
};

/// The row of a collective.
const CollectiveSpec& spec_of(Collective collective);
/// All rows, by the collective's number.
std::span<const CollectiveSpec* const> collective_table() noexcept;

/// Check of collectives that take the digest of a group, or nothing.
void take_digest(const Submitted& submitted);
/// Check of those that take no numbers.
void take_no_numbers(const Submitted& submitted);
/// Check of those that divide their rows by splits, equally if there are none.
void take_splits(const Submitted& submitted);

/// write_rows of collectives to which every rank brings rows: first dimensions [tensor][member].
void write_first_dimensions(std::span<const Descriptor* const> by_member, Execute& order);
std::size_t count_first_dimensions(const Descriptor& descriptor, std::size_t members);
/// True if these can be, and have this rank's.
bool are_first_dimensions_possible(const Received& received);
/// True if a tensor of the description can have so many rows; rows that no tensor can have would overflow later.
bool is_possible(const Descriptor& descriptor, std::size_t tensor, std::int64_t rows);

}  // namespace sparkhvd
