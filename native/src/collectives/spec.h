// One table row per collective: its arguments, the facts that its ranks must agree on, its algorithm. Each file of a
// collective in this folder ends with its row. The engine uses the table and has no code for single collectives.
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

/// Places of the results.
enum class Result : std::uint8_t {
  kNone,
  kSameShape,  // the caller's, each as large as its input
  kInPlace,    // the inputs
  kOwnRows,    // the caller's, each with this rank's rows of its input
  kOfRoot,     // as kSameShape, on the root alone
  kReceived,   // the caller's; there is no input
  kAgreed,     // of negotiated size: the engine's, or the caller's if it has room
};

/// A submission, for the check of its numbers.
struct Submitted {
  Descriptor& descriptor;
  std::int32_t process_set;
  std::span<const Rank> members;
  Rank self;
  std::size_t world_size;
  std::uint64_t slot_bytes;
  std::uint32_t streams;
  bool has_numbers;  // false: the caller passed NULL, not even an empty list
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
  /// From one rank to another, `root`; no other rank takes part.
  bool is_point_to_point = false;
  Result result = Result::kNone;
  /// The first dimension of its tensors is divided, so they have one.
  bool divides_rows = false;
  /// Tensors of two ranks may differ in their first dimension.
  bool is_uneven = false;
  /// Ranks that have joined count as zeros in sums; other reductions need every rank.
  bool goes_on_without_joined = false;
  /// Description of the numbers that must be equal on all ranks; null if each rank has its own.
  const char* same_numbers = "the tensors of the group (by a digest of all of them)";
  /// Checks and completes the numbers of a submission. Throws by Submitted::refuse.
  void (*check)(const Submitted&) = nullptr;
  /// The rows or splits of an order, from every rank's description in the order of the ranks. Throws Error.
  void (*write_rows)(std::span<const Descriptor* const> by_member, Execute& order) = nullptr;
  /// Count of these numbers for one rank, and for rank 0, which passes on orders for devices.
  std::size_t (*count_rows)(const Descriptor&, std::size_t members) = nullptr;
  /// True if the rows of an order are possible. They become sizes of memory.
  bool (*are_rows_possible)(const Received&) = nullptr;
  /// kAgreed: rows of the result of a tensor on one member, by the whole order.
  std::int64_t (*rows_of_result)(const Descriptor&, const Execute& order, std::size_t tensor,
                                 std::span<const Rank> members, std::size_t member) = nullptr;
  /// Null: executed by the engine itself, or nothing to do.
  Task (*run)(Context&) = nullptr;
  /// Name in counters and timelines if NCCL runs it; empty without a device path.
  const char* device_algorithm = "";
  /// Enqueues the calls for one tensor.
  void (*enqueue)(const nccl::Calls&, std::size_t tensor) = nullptr;
};

/// The row of a collective.
const CollectiveSpec& spec_of(Collective collective);
/// All rows, by the collective's number.
std::span<const CollectiveSpec* const> collective_table() noexcept;

/// Check of collectives with the digest of a group, or without numbers.
void take_digest(const Submitted& submitted);
/// Check of collectives without numbers.
void take_no_numbers(const Submitted& submitted);
/// Check of collectives that divide their rows by splits, equally without splits.
void take_splits(const Submitted& submitted);

/// write_rows of collectives with rows from every rank: first dimensions [tensor][member].
void write_first_dimensions(std::span<const Descriptor* const> by_member, Execute& order);
std::size_t count_first_dimensions(const Descriptor& descriptor, std::size_t members);
/// True if these are possible, and include this rank's.
bool are_first_dimensions_possible(const Received& received);
/// True if a tensor of the description can have this many rows; impossible rows would overflow later.
bool is_possible(const Descriptor& descriptor, std::size_t tensor, std::int64_t rows);

}  // namespace sparkhvd
