// Bytes on the wire: control messages and their encoding, without I/O. All reads are checked against the
// available bytes, so that a bad message is an Error and never a crash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "membership.h"
#include "segment.h"
#include "types.h"

namespace sparkhvd {

/// Type of a frame. The numbers are on the wire.
enum class FrameType : std::uint8_t {
  kHello = 1,           // first of control frames; carries the shared memory's descriptors
  kMapped = 2,          // "I could (not) map the memory of my host"
  kReady = 3,           // to the coordinator: this rank has submitted an operation
  kExecute = 4,         // from the coordinator: run it now, as number `sequence`
  kRefuse = 5,          // from the coordinator: it will not run, and why
  kData = 6,            // bytes of a tensor
  kGoodbye = 7,         // the rank leaves gracefully
  kAbort = 8,           // the rank has failed, and the first cause it knows
  kStackRequest = 9,    // from a waiting coordinator: request for stacks
  kStack = 10,          // the answer: stacks of the Python threads
  kSegmentOffer = 11,   // new memory for the ranks of this host, with its descriptor
  kSegmentMapped = 12,  // "I could (not) map what was offered"
  kOrder = 13,          // from a coordinator to rank 0: the set's next operation on devices
  kCredit = 14,         // permission to send tensor bytes
  kPoint = 15,          // of a message from one rank to another
  kReadyAgain = 16,     // to the coordinator: operations of the plan
  kExecuteAgain = 17,   // from the coordinator: these, in this order
};

/// Before every frame: u32 length of the body, u8 type, 3 bytes 0; little-endian.
inline constexpr std::size_t kFrameHeaderBytes = 8;
inline constexpr std::size_t kMaxControlBytes = 4 << 20;
inline constexpr std::size_t kMaxDataBytes = 1 << 20;
inline constexpr std::size_t kMaxNameBytes = 4096;
inline constexpr std::size_t kMaxStackBytes = 64 << 10;
inline constexpr std::uint32_t kMaxDims = 64;
inline constexpr std::size_t kUniqueIdBytes = 128;

struct FrameHeader {
  std::uint32_t body_bytes = 0;
  FrameType type{};
};

/// No tensor is larger, so that sums over ranks cannot overflow.
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 46;

using Bytes = std::vector<std::byte>;

/// Elements of a tensor; nothing if a dimension is negative or the tensor has more than
/// kMaxTensorBytes.
std::optional<std::uint64_t> count_elements(std::span<const std::int64_t> shape,
                                            DType dtype) noexcept;
/// Elements of all dimensions behind the first; 1 for a scalar.
std::size_t row_elements(std::span<const std::int64_t> shape, DType dtype);

/// An operation's facts that must be equal on all ranks, and this rank's own numbers.
struct Descriptor {
  Collective collective{};
  DType dtype{};
  ReduceOp reduce_op{};
  Rank root{};
  double prescale = 1;
  double postscale = 1;
  double timeout_s = 0;  // resolved: 0 = never
  std::vector<std::vector<std::int64_t>> shapes;
  /// alltoall, scatter's root: rows for each member; process sets: the ranks, or the id to remove; registration:
  /// the bytes; configuration: the knobs.
  std::vector<std::int64_t> numbers;
  /// Bytes of this rank's own memory for each result; empty: the engine allocates it.
  std::vector<std::int64_t> room;
  /// Place of this rank's tensors, if in one range of registered memory.
  std::optional<Place> place;
  /// They are on the rank's device, and NCCL runs the operation.
  bool is_on_device = false;
  /// The rank has no memory to spare for a result: see SpareMemory.
  bool lacks_memory = false;
  bool operator==(const Descriptor&) const = default;
};

struct Hello {
  std::uint32_t wire_version = SPARKHVD_WIRE_VERSION;
  std::int32_t rank = 0;
  std::vector<std::int32_t> hosts;
  std::uint64_t slot_bytes = 0;
  std::uint32_t slots = 0;
  std::uint32_t streams = 1;
  bool has_memory = false;
};

struct Mapped {
  bool ok = false;
};

struct Ready {
  std::int32_t process_set = 0;
  std::string name;
  Descriptor descriptor;
};

struct Execute {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;
  std::string name;
  /// allgather, gather: first dimensions [tensor][member]; scatter: splits; alltoall: see AlltoallRows; join: the last
  /// rank.
  std::vector<std::int64_t> rows;
  /// By contributor (of the receiver's island, after sending), in rank order, if all of them have their tensors
  /// in registered memory; else empty.
  std::vector<Place> places = {};
  /// Ranks that take part, if some ranks of the process set have joined; else empty. Joined ranks get the
  /// operation from `descriptor`.
  std::vector<Rank> contributors = {};
  std::optional<Descriptor> descriptor = {};
  /// An operation on devices, with separate numbers, from rank 0, in one order for all process sets.
  bool is_on_device = false;
  /// With the first of a process set: NCCL's unique id for its communicator.
  std::vector<std::uint8_t> unique_id = {};
  /// A result is so large that every rank first reports whether it has memory for its own.
  bool asks_for_memory = false;
  /// alltoall: rows [from][to], for the coordinator and rank 0. Ranks that read one message in shared memory
  /// take their own `rows` from it.
  std::vector<std::int64_t> splits = {};
  /// The operation's number in the plan: every rank stores its submission and this order.
  std::optional<std::uint32_t> number = {};
};

/// Repeated submissions of the plan.
struct ReadyAgain {
  std::int32_t process_set = 0;
  std::vector<std::uint32_t> numbers;
};

/// Orders of the plan, in this order; the first is number `sequence` of its process set.
struct ExecuteAgain {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;
  std::vector<std::uint32_t> numbers;
};

/// Message that rank 0 passes on to a process set that it does not coordinate.
struct Order {
  Execute execute;
};

struct Refuse {
  std::int32_t process_set = 0;
  std::string name;
  std::int32_t status = 0;
  std::string message;
  /// The end of a process set: number of its orders for devices, which arrive on another route.
  std::uint64_t device_orders = 0;
  std::vector<Loss> losses = {};  // known to the sender, if one of them is the reason
};

struct Goodbye {
  /// By process set: operations that this rank has finished; others can finish them too.
  struct Entry {
    std::int32_t process_set = 0;
    std::uint64_t executed = 0;
    std::uint64_t executed_on_device = 0;
  };
  std::vector<Entry> sets;
};

/// Memory for the ranks of this host, from operation `key.sequence` of a process set.
struct SegmentOffer {
  SegmentKey key;
  bool has_memory = false;  // its descriptor comes with the frame
};

/// An answer for operation `key.sequence` of a process set: the rank has mapped the offered memory, or has memory for
/// its result.
struct SegmentMapped {
  SegmentKey key;
  bool ok = false;
};

/// Total bytes of a process set that its sender may send on one of the pair's connections for tensors.
struct Credit {
  std::int32_t process_set = 0;
  std::uint32_t connection = 0;
  std::uint64_t bytes = 0;
};

/// Kinds of frames about a message from one rank to another.
enum class PointKind : std::uint8_t {
  kEager = 0,     // the message
  kAnnounce = 1,  // a large message: sent after acceptance
  kAccept = 2,    // the bytes of message `number` may be sent
  kTaken = 3,     // `number` bytes of small messages have been received in all
  kReject = 4,    // message `number` does not fit its receive
  kWithdraw = 5,  // message `number` is withdrawn
};

struct Point {
  PointKind kind{};
  std::int32_t process_set = 0;
  std::int64_t tag = 0;
  DType dtype{};
  std::uint64_t bytes = 0;
  std::uint64_t number = 0;  // of its sender's to its receiver
  std::string text;
  std::span<const std::byte> payload;  // decoded: in the body
};

struct StackRequest {
  bool for_life = false;  // a sign of life is enough
};

struct Stack {
  std::string text;            // at most kMaxStackBytes; empty as a sign of life
  std::uint64_t still_ms = 0;  // since this rank's last tensor bytes on a connection
};

struct Abort {
  std::int32_t status = 0;
  std::string message;
  std::vector<Loss> losses = {};  // that the sender knows of
};

/// A whole frame, header included.
Bytes encode(const Hello& message);
Bytes encode(const Mapped& message);
Bytes encode(const Ready& message);
Bytes encode(const Execute& message);
Bytes encode(const Order& message);
Bytes encode(const Refuse& message);
Bytes encode(const Goodbye& message);
Bytes encode(const Abort& message);
Bytes encode(const StackRequest& message);
Bytes encode(const Stack& message);
Bytes encode(const SegmentOffer& message);
Bytes encode(const SegmentMapped& message);
Bytes encode(const Credit& message);
Bytes encode(const Point& message);
Bytes encode(const ReadyAgain& message);
Bytes encode(const ExecuteAgain& message);
/// The frame without its payload, which follows.
Bytes encode_head(const Point& message);

/// The header of a data frame; the body follows from the tensor's own memory. `stream` is the
/// process set.
inline constexpr std::size_t kDataHeaderBytes = kFrameHeaderBytes + 4;
std::array<std::byte, kDataHeaderBytes> encode_data_header(std::int32_t stream,
                                                           std::size_t payload_bytes);

/// Throws Error with a sentence fragment ("a frame of unknown type 77").
FrameHeader decode_header(std::span<const std::byte> header);

/// Decodes the body of a frame of type `Message`; throws Error unless the body is exactly one.
template <class Message>
Message decode(std::span<const std::byte> body);
template <>
Hello decode<Hello>(std::span<const std::byte> body);
template <>
Mapped decode<Mapped>(std::span<const std::byte> body);
template <>
Ready decode<Ready>(std::span<const std::byte> body);
template <>
Execute decode<Execute>(std::span<const std::byte> body);
template <>
Order decode<Order>(std::span<const std::byte> body);
template <>
Refuse decode<Refuse>(std::span<const std::byte> body);
template <>
Goodbye decode<Goodbye>(std::span<const std::byte> body);
template <>
Abort decode<Abort>(std::span<const std::byte> body);
template <>
StackRequest decode<StackRequest>(std::span<const std::byte> body);
template <>
Stack decode<Stack>(std::span<const std::byte> body);
template <>
SegmentOffer decode<SegmentOffer>(std::span<const std::byte> body);
template <>
SegmentMapped decode<SegmentMapped>(std::span<const std::byte> body);
template <>
Credit decode<Credit>(std::span<const std::byte> body);
template <>
Point decode<Point>(std::span<const std::byte> body);
template <>
ReadyAgain decode<ReadyAgain>(std::span<const std::byte> body);
template <>
ExecuteAgain decode<ExecuteAgain>(std::span<const std::byte> body);

}  // namespace sparkhvd
