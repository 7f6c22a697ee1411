// Alltoall with any number of rows between any two ranks. Between islands the bytes move directly from tensor to
// result, inside an island through the slots of shared memory.
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "engine/orders.h"
#include "error.h"
#include "nccl/calls.h"

namespace sparkhvd {
namespace {

/// Bytes from and to this rank: their positions in its tensor, in its result, and in the streams inside the island. A
/// rank's stream has all rows that it sends to the other ranks of its island.
class Exchange {
 public:
  explicit Exchange(const Context& context)
      : outgoing_(context.operation.descriptor.numbers),
        rows_(context.agreed.rows, context.team.size()) {
    const Descriptor& descriptor = context.operation.descriptor;
    row_bytes_ =
        row_elements(descriptor.shapes.at(0), descriptor.dtype) * element_size(descriptor.dtype);
  }
  std::span<const std::int64_t> incoming_rows() const { return rows_.incoming; }
  /// Range of the rows for `to` in this rank's tensor.
  Range outgoing(std::size_t to) const { return range(outgoing_, to); }
  /// Range of the rows from `from` in this rank's result. `from` may be the number of ranks, for the end of the result.
  Range incoming(std::size_t from) const { return range(rows_.incoming, from); }
  /// Start of this rank's rows in the stream of the island's rank `local`.
  std::size_t stream_begin(std::size_t local) const { return bytes(rows_.before[local]); }
  std::size_t longest_stream() const { return bytes(rows_.longest); }

 private:
  std::size_t bytes(std::int64_t rows) const { return static_cast<std::size_t>(rows) * row_bytes_; }
  Range range(std::span<const std::int64_t> rows, std::size_t index) const {
    Range result{0, index < rows.size() ? bytes(rows[index]) : 0};
    for (const auto before : rows.first(index)) result.begin += bytes(before);
    return result;
  }

  std::span<const std::int64_t> outgoing_;
  AlltoallRows rows_;
  std::size_t row_bytes_;
};

}  // namespace

Task alltoall(Context& context) {
  context.algorithm = "alltoall";
  const Communicator& communicator = context.communicator;
  Operation& operation = context.operation;
  const Team& team = context.team;
  const Exchange exchange(context);
  operation.rows.assign(exchange.incoming_rows().begin(), exchange.incoming_rows().end());
  const std::size_t bytes = exchange.incoming(team.size()).begin;
  ResultMemory memory;
  co_await make_result(context, std::vector(1, bytes), memory);
  const std::span<std::byte> result = memory.part({0, bytes});
  const auto place = [&](std::size_t from) {
    const Range range = exchange.incoming(from);
    return result.subspan(range.begin, range.size);
  };
  const Pieces& pieces = operation.pieces;
  pieces.read(exchange.outgoing(team.index()).begin, place(team.index()));

  Transfers transfers(context.communicator);
  for (std::size_t i = 1; i < team.size(); ++i) {
    // Each rank begins with another rank, so that the ranks do not all send to the same rank first.
    const std::size_t to = (team.index() + i) % team.size();
    const std::size_t from = (team.index() + team.size() - i) % team.size();
    const auto is_mate = [&](std::size_t member) {
      return std::ranges::count(team.island(), team.ranks()[member]) > 0;
    };
    if (!is_mate(from)) transfers.receive(team.ranks()[from], place(from));
    if (is_mate(to)) continue;
    const Range range = exchange.outgoing(to);
    pieces.for_range(range.begin, range.size, [&](const Pieces::Part& part) {
      transfers.send(team.ranks()[to], {part.input, part.bytes});
    });
  }

  const std::size_t chunk_bytes = communicator.knobs().chunk_bytes;
  struct Wanted {
    Range place;            // range in the result
    std::size_t begin = 0;  // position in the sender's stream
  };
  std::vector<Wanted> wanted(team.local_size());
  for (std::size_t local = 0; local < team.local_size(); ++local) {
    if (local == team.local_index()) continue;
    const std::size_t giver = team.index_in(team.island()[local]);
    wanted[local] = {exchange.incoming(giver), exchange.stream_begin(local)};
  }
  Passage passage;
  passage.chunks = (exchange.longest_stream() + chunk_bytes - 1) / chunk_bytes;
  RangeList given;  // this rank's stream, as ranges of its tensor
  for (const Rank local_peer : team.island()) {
    if (local_peer != team.self()) given.add(exchange.outgoing(team.index_in(local_peer)));
  }
  passage.fill = [&](std::uint64_t chunk, std::byte* slot) {
    given.for_range(chunk * chunk_bytes, chunk_bytes,
                    [&](std::size_t begin, std::size_t offset, std::size_t bytes) {
                      pieces.read(begin, {slot + offset, bytes});
                    });
  };
  passage.take = [&](std::uint64_t chunk, std::uint64_t number) {
    for (std::size_t local = 0; local < wanted.size(); ++local) {
      const auto& [place, start] = wanted[local];
      const std::size_t chunk_begin = chunk * chunk_bytes;
      const std::size_t begin = std::max(chunk_begin, start);
      const std::size_t end = std::min(chunk_begin + chunk_bytes, start + place.size);
      if (begin >= end) continue;
      const std::byte* slot = communicator.slot(team.island()[local], number);
      std::memcpy(result.data() + place.begin + (begin - start), slot + (begin - chunk_begin),
                  end - begin);
    }
  };
  co_await pass_through_slots(context, std::move(passage));
  co_await transfers.all_received();
  co_await transfers.all_sent();
}

namespace {

void write_splits(std::span<const Descriptor* const> by_member, Execute& order) {
  for (const Descriptor* descriptor : by_member) {
    const auto& numbers = descriptor->numbers;
    if (numbers.size() != by_member.size()) {
      throw Error(SPARKHVD_PEER_LOST,
                  "an alltoall with " + std::to_string(numbers.size()) + " splits");
    }
    order.splits.insert(order.splits.end(), numbers.begin(), numbers.end());
  }
}

std::size_t count_splits(const Descriptor& descriptor, std::size_t members) {
  // For devices, rank 0 receives the rows between all pairs of ranks, and sends every rank its part.
  return members * (descriptor.is_on_device ? members : 2);
}

bool are_alltoall_rows_possible(const Received& received) {
  const auto& [descriptor, order, team] = received;
  const std::size_t local_size = order.is_on_device ? 0 : team.local_size();
  return order.rows.size() == AlltoallRows::count(team.size(), local_size) &&
         order.rows[team.index()] == descriptor.numbers[team.index()] &&
         std::ranges::all_of(order.rows,
                             [&](auto rows) { return is_possible(descriptor, 0, rows); });
}

std::int64_t rows_of_alltoall(const Descriptor&, const Execute& order, std::size_t,
                              std::span<const Rank> members, std::size_t member) {
  std::int64_t rows = 0;
  for (std::size_t from = 0; from < members.size(); ++from) {
    rows += order.splits[from * members.size() + member];
  }
  return rows;
}

void enqueue_alltoall(const nccl::Calls& calls, std::size_t tensor) {
  const std::size_t row_bytes = calls.shape(tensor).row_bytes;
  const std::byte* input = calls.input(tensor);
  std::byte* output = calls.output(tensor);
  for (std::size_t member = 0; member < calls.members(); ++member) {
    const auto sent = static_cast<std::size_t>(calls.descriptor().numbers[member]) * row_bytes;
    calls.send(input, sent, member);
    input += sent;
    const auto received = static_cast<std::size_t>(calls.rows()[member]) * row_bytes;
    calls.receive(output, received, member);
    output += received;
  }
}

}  // namespace

extern const CollectiveSpec kAlltoallSpec = {.collective = Collective::kAlltoall,
                                             .min_tensors = 1,
                                             .max_tensors = 1,
                                             .result = Result::kAgreed,
                                             .is_uneven = true,
                                             .same_numbers = nullptr,
                                             .check = take_splits,
                                             .write_rows = write_splits,
                                             .count_rows = count_splits,
                                             .are_rows_possible = are_alltoall_rows_possible,
                                             .rows_of_result = rows_of_alltoall,
                                             .run = alltoall,
                                             .device_algorithm = "nccl_alltoall",
                                             .enqueue = enqueue_alltoall};

}  // namespace sparkhvd
