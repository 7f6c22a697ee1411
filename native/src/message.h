// Control messages and their encoding as bytes on the wire, without I/O. A decoder checks every read against the
// available bytes, so that an invalid message causes an Error and never a crash.
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

/// Type of a frame. The numbers are on the wire, so they must not change.
enum class FrameType : std::uint8_t {
  kHello = 1,           // the first control frame; carries the descriptors of the shared memory
  kMapped = 2,          // "I could (not) map the memory of my host"
  kReady = 3,           // to the coordinator: this rank has submitted an operation
  kExecute = 4,         // from the coordinator: run the operation, as number `sequence`
  kRefuse = 5,          // from the coordinator: the operation will not run, and why
  kData = 6,            // bytes of a tensor
  kGoodbye = 7,         // the rank leaves gracefully
  kAbort = 8,           // the rank's engine has failed; carries the first cause that it knows
  kStackRequest = 9,    // from a waiting coordinator: request for the stacks of a late rank
  kStack = 10,          // answer to kStackRequest: stacks of the Python threads
  kSegmentOffer = 11,   // new memory for the ranks of this host, with its descriptor
  kSegmentMapped = 12,  // "I could (not) map the offered memory"
  kOrder = 13,          // from a coordinator to rank 0: the set's next operation on devices
  kCredit = 14,         // permission to send tensor bytes
  kPoint = 15,          // part of a message from one rank to another (send, recv)
  kReadyAgain = 16,     // to the coordinator: this rank has submitted these operations of the plan
  kExecuteAgain = 17,   // from the coordinator: run these operations of the plan, in this order
};

/// Size of the header of every frame: u32 length of the body, u8 type, 3 bytes 0; little-endian.
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

/// Largest size of a tensor. The limit keeps sums over ranks from overflowing.
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 46;

using Bytes = std::vector<std::byte>;

/// Number of elements of a tensor; std::nullopt if a dimension is negative or the tensor has more than kMaxTensorBytes.
std::optional<std::uint64_t> count_elements(std::span<const std::int64_t> shape,
                                            DType dtype) noexcept;
/// Product of all dimensions after the first; 1 for a scalar.
std::size_t row_elements(std::span<const std::int64_t> shape, DType dtype);

/// Description of a rank's submission: facts that must be equal on all ranks, and numbers of this rank.
struct Descriptor {
  Collective collective{};
  DType dtype{};
  ReduceOp reduce_op{};
  Rank root{};
  double prescale = 1;
  double postscale = 1;
  double timeout_s = 0;  // with the default already filled in; 0 = never
  std::vector<std::vector<std::int64_t>> shapes;
  /// alltoall, and scatter on its root: rows for each member. Process sets: the ranks to add, or the id to remove.
  /// Registration: the bytes. Configuration: the knobs.
  std::vector<std::int64_t> numbers;
  /// Bytes of the caller's memory for each result; empty if the engine allocates the results.
  std::vector<std::int64_t> room;
  /// Place of this rank's tensors, if all are in one range of registered memory.
  std::optional<Place> place;
  /// True if the tensors are on the rank's device: NCCL runs the operation.
  bool is_on_device = false;
  /// True if the rank could not reserve its SpareMemory for results.
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
  /// allgather, gather: first dimensions [tensor][member]; scatter: the root's splits; alltoall: see AlltoallRows;
  /// join: the rank that joined last.
  std::vector<std::int64_t> rows;
  /// Places of the contributors' tensors, in rank order; empty unless all of them are in registered memory. The message
  /// to a rank has only the places of its island.
  std::vector<Place> places = {};
  /// Ranks that take part, if some ranks of the process set have joined; else empty. A joined rank has not submitted
  /// the operation, so it reads it from `descriptor`.
  std::vector<Rank> contributors = {};
  std::optional<Descriptor> descriptor = {};
  /// True for an operation on devices. Rank 0 sends these orders, in one order for all process sets; they have their
  /// own sequence numbers.
  bool is_on_device = false;
  /// NCCL's unique id for the communicator; only in the first order for devices of a process set.
  std::vector<std::uint8_t> unique_id = {};
  /// True if every rank first reports whether it has memory for its result: a result is large, or a rank lacks memory.
  bool asks_for_memory = false;
  /// alltoall: rows [from][to], between coordinator and rank 0, and in shared memory. There all ranks read one message,
  /// and each computes its own `rows` from `splits`.
  std::vector<std::int64_t> splits = {};
  /// The operation's number in the plan, if it gets a number now: every rank then stores its submission and this order.
  std::optional<std::uint32_t> number = {};
};

/// Submissions of operations of the plan, by number.
struct ReadyAgain {
  std::int32_t process_set = 0;
  std::vector<std::uint32_t> numbers;
};

/// Orders to run operations of the plan, in this order. The first has the number `sequence` in its process set.
struct ExecuteAgain {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;
  std::vector<std::uint32_t> numbers;
};

/// An order for devices that a coordinator sends to rank 0. Rank 0 passes it on to the ranks of the process set.
struct Order {
  Execute execute;
};

struct Refuse {
  std::int32_t process_set = 0;
  std::string name;
  std::int32_t status = 0;
  std::string message;
  /// At the end of a process set: the number of its orders for devices. These come from rank 0 and may arrive later.
  std::uint64_t device_orders = 0;
  std::vector<Loss> losses = {};  // losses that the sender knows, if a loss is the reason
};

struct Goodbye {
  /// Numbers of operations of a process set that this rank has finished. The other ranks can finish them too.
  struct Entry {
    std::int32_t process_set = 0;
    std::uint64_t executed = 0;
    std::uint64_t executed_on_device = 0;
  };
  std::vector<Entry> sets;
};

/// Offer of new memory to the ranks of this host, during operation `key.sequence` of a process set.
struct SegmentOffer {
  SegmentKey key;
  bool has_memory = false;  // its descriptor comes with the frame
};

/// Answer during operation `key.sequence` of a process set: whether the rank has mapped the offered memory, or has
/// memory for its result.
struct SegmentMapped {
  SegmentKey key;
  bool ok = false;
};

/// Permission to send: the total bytes of a process set that may use one connection for tensors since the start.
struct Credit {
  std::int32_t process_set = 0;
  std::uint32_t connection = 0;
  std::uint64_t bytes = 0;
};

/// Kinds of frames about a message from one rank to another.
enum class PointKind : std::uint8_t {
  kEager = 0,     // a small message with its bytes
  kAnnounce = 1,  // a large message; its bytes follow after kAccept
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
  std::uint64_t number = 0;  // counts the messages from this sender to this receiver
  std::string text;
  std::span<const std::byte> payload;  // after decoding: a part of the frame's body
};

struct StackRequest {
  bool for_life = false;  // the answer needs no stacks, because it only proves that the rank lives
};

struct Stack {
  std::string text;            // the stacks, at most kMaxStackBytes; empty in a sign of life
  std::uint64_t still_ms = 0;  // time since this rank's last tensor bytes on a connection
};

struct Abort {
  std::int32_t status = 0;
  std::string message;
  std::vector<Loss> losses = {};  // losses that the sender knows
};

/// Encodes a message as a whole frame, including the header.
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
/// Encodes the frame without its payload. The caller sends the payload next.
Bytes encode_head(const Point& message);

/// Encodes the header of a data frame. The caller sends the body from the tensor's memory. `stream` is the number of
/// the process set.
inline constexpr std::size_t kDataHeaderBytes = kFrameHeaderBytes + 4;
std::array<std::byte, kDataHeaderBytes> encode_data_header(std::int32_t stream,
                                                           std::size_t payload_bytes);

/// Decodes a header. Throws Error with a phrase about the invalid data ("a frame of unknown type 77").
FrameHeader decode_header(std::span<const std::byte> header);

/// Decodes the body of a frame of type `Message`. Throws Error unless the body is exactly one such message.
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
