// A table with a row for each collective: its arguments, the facts that its ranks must agree on, and its algorithm.
// Each file of a collective in this folder ends with its row. The engine uses the table and has no code for single
// collectives.
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

/// Where a collective puts its results, and their sizes.
enum class Result : std::uint8_t {
  kNone,
  kSameShape,  // in the caller's memory, each as large as its input
  kInPlace,    // in the inputs
  kOwnRows,    // in the caller's memory, each with this rank's rows of its input
  kOfRoot,     // as kSameShape, but only on the root
  kReceived,   // in the caller's memory; there is no input
  kAgreed,     // size is negotiated: in the caller's memory if given, else the engine allocates it
};

/// A submission, for the check of its numbers (splits, tags, ids, ...).
struct Submitted {
  Descriptor& descriptor;
  std::int32_t process_set;
  std::span<const Rank> members;
  Rank self;
  std::size_t world_size;
  std::uint64_t slot_bytes;
  std::uint32_t streams;
  bool has_numbers;  // false: the caller passed NULL; an empty list counts as numbers
  std::string label;

  /// Throws InvalidArgument with the operation and this text.
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
  std::uint32_t max_tensors = 0;  // 0: the collective has no tensors and no dtype
  bool reduces = false;
  bool has_root = false;
  /// True for send and receive: only this rank and rank `root` take part.
  bool is_point_to_point = false;
  Result result = Result::kNone;
  /// True if the first dimension of the tensors is divided among the ranks, so a tensor cannot be a scalar.
  bool divides_rows = false;
  /// True if the first dimension of the tensors may differ from rank to rank.
  bool is_uneven = false;
  /// True if the collective can run without ranks that have joined. They then count as zeros, so only sums can run.
  bool goes_on_without_joined = false;
  /// Description of the numbers that must be equal on all ranks; null if each rank has its own.
  const char* same_numbers = "the tensors of the group (by a digest of all of them)";
  /// Checks and completes the numbers of a submission. Throws by Submitted::refuse.
  void (*check)(const Submitted&) = nullptr;
  /// Writes the rows or splits of an order from the descriptions of all ranks. Throws Error if they are invalid.
  void (*write_rows)(std::span<const Descriptor* const> by_member, Execute& order) = nullptr;
  /// Count of the order's numbers for a rank, and for rank 0, which passes on orders for devices.
  std::size_t (*count_rows)(const Descriptor&, std::size_t members) = nullptr;
  /// True if the rows of an order are valid. They are checked because they become sizes of memory.
  bool (*are_rows_possible)(const Received&) = nullptr;
  /// kAgreed: rows of a tensor's result on a member, computed from the whole order.
  std::int64_t (*rows_of_result)(const Descriptor&, const Execute& order, std::size_t tensor,
                                 std::span<const Rank> members, std::size_t member) = nullptr;
  /// The algorithm; null if the engine executes the operation itself, or if there is nothing to do.
  Task (*run)(Context&) = nullptr;
  /// Name in counters and timelines if NCCL runs the collective; empty if NCCL cannot run it.
  const char* device_algorithm = "";
  /// Enqueues the NCCL calls for one tensor.
  void (*enqueue)(const nccl::Calls&, std::size_t tensor) = nullptr;
};

/// The table's row of a collective.
const CollectiveSpec& spec_of(Collective collective);
/// All rows of the table, by the collective's number.
std::span<const CollectiveSpec* const> collective_table() noexcept;

/// Checks the numbers of collectives that take the digest of a group or no numbers.
void take_digest(const Submitted& submitted);
/// Checks that a collective without numbers has none.
void take_no_numbers(const Submitted& submitted);
/// Checks the splits of collectives that divide rows by splits. Without splits it writes equal splits.
void take_splits(const Submitted& submitted);

/// Writes the first dimensions [tensor][member] into an order, for collectives with rows from every rank.
void write_first_dimensions(std::span<const Descriptor* const> by_member, Execute& order);
std::size_t count_first_dimensions(const Descriptor& descriptor, std::size_t members);
/// True if the first dimensions of an order are valid, and equal this rank's own first dimensions.
bool are_first_dimensions_possible(const Received& received);
/// True if a tensor of the description can have this number of rows. Larger numbers would overflow later.
bool is_possible(const Descriptor& descriptor, std::size_t tensor, std::int64_t rows);

}  // namespace sparkhvd
