// Allreduce of partial results between islands, over connections: a step of hierarchical_allreduce.
#include <memory>

#include "collectives/collectives.h"

namespace sparkhvd {
namespace {

// Up to here everyone exchanges with everyone in two steps and adds in island order. Above, the
// messages get short and the connections many: a ring.
constexpr std::size_t kMaxDirect = 16;

struct Lane {
  std::vector<Rank> ranks;
  std::size_t me;
  std::size_t accumulator_bytes;  // per element
  std::size_t element_bytes;

  std::size_t size() const noexcept { return ranks.size(); }
  Range block(const CrossExchange& exchange, std::size_t index) const noexcept {
    return part_of(exchange.count, size(), index % size(), element_bytes);
  }
  std::span<std::byte> partial(const CrossExchange& exchange, std::size_t index) const noexcept {
    const Range range = block(exchange, index);
    return {exchange.partial + range.begin * accumulator_bytes, range.size * accumulator_bytes};
  }
  std::span<std::byte> result(const CrossExchange& exchange, std::size_t index) const noexcept {
    const Range range = block(exchange, index);
    return {exchange.result + range.begin * element_bytes, range.size * element_bytes};
  }
};

Lane lane_of(const Context& context) {
  const Communicator& communicator = context.communicator;
  const DType dtype = context.operation.descriptor.dtype;
  Lane lane{
      {}, communicator.island_index(), element_size(accumulation_type(dtype)), element_size(dtype)};
  for (const auto& island : communicator.islands()) {
    lane.ranks.push_back(island[communicator.local_index()]);
  }
  return lane;
}

/// Everyone sends each block to its owner, who adds them up and sends the result to everyone.
Task direct_exchange(Context& context, CrossExchange exchange) {
  const Lane lane = lane_of(context);
  const std::int32_t stream = context.operation.process_set;
  const auto mine = lane.partial(exchange, lane.me);
  const auto incoming = std::make_unique_for_overwrite<std::byte[]>(mine.size() * lane.size());
  std::vector<const void*> sources(lane.size());
  Transfers partials(context.communicator, stream);
  for (std::size_t i = 0; i < lane.size(); ++i) {
    std::byte* place = incoming.get() + i * mine.size();
    sources[i] = i == lane.me ? mine.data() : place;
    if (i == lane.me) continue;
    partials.receive(lane.ranks[i], {place, mine.size()});
    partials.send(lane.ranks[i], lane.partial(exchange, i));
  }
  co_await partials.all_received();
  const auto result = lane.result(exchange, lane.me);
  context.kernels.finish(context.operation.descriptor.dtype, kernel_op(context), result.data(),
                         sources, result.size() / lane.element_bytes, scaling_of(context));
  Transfers results(context.communicator, stream);
  for (std::size_t i = 0; i < lane.size(); ++i) {
    if (i == lane.me) continue;
    results.send(lane.ranks[i], result);
    results.receive(lane.ranks[i], lane.result(exchange, i));
  }
  co_await results.all_received();
  co_await results.all_sent();
  co_await partials.all_sent();
}

/// 2(P-1) steps to the next neighbour (ring; Patarasuk & Yuan, JPDC 2009,
/// doi:10.1016/j.jpdc.2008.09.002). A block is added up along the ring, so its order of addends
/// starts behind its owner.
Task ring_exchange(Context& context, CrossExchange exchange) {
  const Lane lane = lane_of(context);
  const std::int32_t stream = context.operation.process_set;
  const DType dtype = context.operation.descriptor.dtype;
  const std::size_t size = lane.size();
  const Rank next = lane.ranks[(lane.me + 1) % size];
  const Rank previous = lane.ranks[(lane.me + size - 1) % size];
  const auto incoming =
      std::make_unique_for_overwrite<std::byte[]>(lane.partial(exchange, 0).size());
  for (std::size_t step = 0; step + 1 < size; ++step) {
    Transfers transfers(context.communicator, stream);
    const auto own = lane.partial(exchange, lane.me + 2 * size - step - 1);
    transfers.receive(previous, {incoming.get(), own.size()});
    transfers.send(next, lane.partial(exchange, lane.me + 2 * size - step));
    co_await transfers.all_received();
    const void* sources[] = {incoming.get(), own.data()};
    context.kernels.reduce(accumulation_type(dtype), kernel_op(context), own.data(), sources,
                           own.size() / lane.accumulator_bytes, Scaling{});
    co_await transfers.all_sent();
  }
  const std::size_t owned = lane.me + 1;
  const void* total[] = {lane.partial(exchange, owned).data()};
  const auto result = lane.result(exchange, owned);
  context.kernels.finish(dtype, kernel_op(context), result.data(), total,
                         result.size() / lane.element_bytes, scaling_of(context));
  for (std::size_t step = 0; step + 1 < size; ++step) {
    Transfers transfers(context.communicator, stream);
    transfers.receive(previous, lane.result(exchange, lane.me + 2 * size - step));
    transfers.send(next, lane.result(exchange, owned + 2 * size - step));
    co_await transfers.all_received();
    co_await transfers.all_sent();
  }
}

}  // namespace

Task cross_allreduce(Context& context, CrossExchange exchange) {
  if (context.communicator.islands().size() <= kMaxDirect) {
    return direct_exchange(context, exchange);
  }
  return ring_exchange(context, exchange);
}

}  // namespace sparkhvd
