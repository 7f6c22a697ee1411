#include "collectives/stepped_exchange.h"

#include <algorithm>
#include <bit>

namespace sparkhvd {

SteppedExchange::SteppedExchange(Context& context, std::size_t window, std::size_t slice_elements,
                                 std::size_t steps, std::size_t parts_at_once)
    : size_(context.team.islands().size()),
      me_(context.team.island_index()),
      ranks_(lane_of(context.team)),
      context_(context),
      pieces_(context.operation.pieces),
      dtype_(context.operation.descriptor.dtype),
      wide_(accumulation_type(dtype_)),
      element_(element_size(dtype_)),
      steps_(steps),
      incoming_bytes_(part_of(slice_elements, size_, 0, element_).size * element_size(wide_) *
                      parts_at_once),
      incoming_(std::make_unique_for_overwrite<std::byte[]>(window * incoming_bytes_)),
      flights_(window, Flight{Transfers(context.communicator), Transfers(context.communicator),
                              Range{}, nullptr, 0, nullptr}) {}

void SteppedExchange::start(std::uint64_t chunk, Range slice, std::byte* partial) {
  std::byte* incoming = incoming_.get() + chunk % flights_.size() * incoming_bytes_;
  flight(chunk) = {Transfers(context_.communicator),
                   Transfers(context_.communicator),
                   slice,
                   partial,
                   0,
                   incoming};
  end_ = chunk + 1;
  exchange(flight(chunk));
}

Transfers::Done SteppedExchange::arrived(std::uint64_t chunk) const {
  return flight(chunk).arriving.all_received();
}

Transfers::Done SteppedExchange::sent(std::uint64_t chunk) const {
  return flight(chunk).leaving.all_sent();
}

void SteppedExchange::advance(std::uint64_t chunk) {
  Flight& now = flight(chunk);
  take(now);
  if (++now.step == steps_) {
    oldest_ = chunk + 1;
    return;
  }
  now.arriving = Transfers(context_.communicator);
  exchange(now);
}

/// Calls `use(Range)` for each contiguous range of these parts: one range, or two if the parts wrap around the slice's
/// end.
template <class Use>
void SteppedExchange::for_runs(const Flight& flight, Parts parts, Use use) const {
  const std::size_t first = parts.first % size_;
  const std::size_t before_end = std::min(parts.count, size_ - first);
  const auto run = [&](std::size_t begin, std::size_t count) {
    if (count == 0) return;
    const Range from = part_of_slice(flight.slice, size_, begin, element_);
    const Range to = part_of_slice(flight.slice, size_, begin + count - 1, element_);
    use(Range{from.begin, to.begin + to.size - from.begin});
  };
  run(first, before_end);
  run(0, parts.count - before_end);
}

std::span<std::byte> SteppedExchange::partial_of(const Flight& flight, Range run) const noexcept {
  const std::size_t wide = element_size(wide_);
  return {flight.partial + (run.begin - flight.slice.begin) / element_ * wide,
          run.size / element_ * wide};
}

void SteppedExchange::exchange_sums(Flight& flight, Rank to, Parts leaving, Rank from,
                                    Parts arriving) const {
  std::byte* incoming = flight.incoming;
  for_runs(flight, arriving, [&](Range run) {
    const std::size_t bytes = partial_of(flight, run).size();
    flight.arriving.receive(from, {incoming, bytes});
    incoming += bytes;
  });
  for_runs(flight, leaving, [&](Range run) { flight.leaving.send(to, partial_of(flight, run)); });
}

void SteppedExchange::add(const Flight& flight, Parts arrived) const {
  const std::byte* incoming = flight.incoming;
  for_runs(flight, arrived, [&](Range run) {
    const auto own = partial_of(flight, run);
    const void* sources[] = {incoming, own.data()};
    context_.kernels.reduce(wide_, kernel_op(context_), own.data(), sources,
                            own.size() / element_size(wide_), Scaling{});
    incoming += own.size();
  });
}

void SteppedExchange::finish(const Flight& flight, std::size_t part) const {
  for_runs(flight, {part, 1}, [&](Range run) {
    const std::byte* sums = partial_of(flight, run).data();
    pieces_.for_range(run.begin, run.size, [&](const Pieces::Part& piece) {
      const void* total[] = {sums + piece.offset / element_ * element_size(wide_)};
      context_.kernels.finish(dtype_, kernel_op(context_), piece.output, total,
                              piece.bytes / element_, scaling_of(context_));
    });
  });
}

void SteppedExchange::exchange_results(Flight& flight, Rank to, Parts leaving, Rank from,
                                       Parts arriving) const {
  for_runs(flight, arriving, [&](Range run) {
    pieces_.for_range(run.begin, run.size, [&](const Pieces::Part& piece) {
      flight.arriving.receive(from, {piece.output, piece.bytes});
    });
  });
  for_runs(flight, leaving, [&](Range run) {
    pieces_.for_range(run.begin, run.size, [&](const Pieces::Part& piece) {
      flight.leaving.send(to, {piece.output, piece.bytes});
    });
  });
}

// ---- Ring ------------------------------------------------------------------------------------

RingExchange::RingExchange(Context& context, std::size_t window, std::size_t slice_elements)
    : SteppedExchange(context, window, slice_elements, steps(context.team.islands().size()), 1) {}

/// Posts a step of the ring. The first P - 1 steps send sums, to which each rank adds its own addend; the others send
/// results.
void RingExchange::exchange(Flight& flight) {
  const Rank next = ranks_[(me_ + 1) % size_];
  const Rank previous = ranks_[(me_ + size_ - 1) % size_];
  const std::size_t sums = size_ - 1;
  if (flight.step < sums) {
    const std::size_t leaving = me_ + size_ - flight.step;
    return exchange_sums(flight, next, {leaving, 1}, previous, {leaving - 1, 1});
  }
  const std::size_t arriving = me_ + size_ - (flight.step - sums);
  exchange_results(flight, next, {arriving + 1, 1}, previous, {arriving, 1});
}

void RingExchange::take(const Flight& flight) {
  if (flight.step + 1 < size_) add(flight, {me_ + size_ - flight.step - 1, 1});
  if (flight.step + 2 == size_) finish(flight, me_ + 1);
}

// ---- Halving and doubling --------------------------------------------------------------------

std::vector<HalvingExchange::Round> HalvingExchange::rounds_of(std::size_t islands) {
  std::vector<Round> rounds;
  for (std::size_t left = islands; left > 1;) {
    const std::size_t distance = (left + 1) / 2;
    rounds.push_back({distance, left - distance});
    left = distance;
  }
  return rounds;
}

std::size_t HalvingExchange::steps(std::size_t islands) noexcept {
  return 2 * static_cast<std::size_t>(std::bit_width(islands - 1));  // 2 per round of rounds_of()
}

HalvingExchange::HalvingExchange(Context& context, std::size_t window, std::size_t slice_elements)
    : SteppedExchange(context, window, slice_elements, steps(context.team.islands().size()),
                      context.team.islands().size() / 2),
      rounds_(rounds_of(context.team.islands().size())) {}

/// Posts a step of halving and doubling. This rank owns part `me`. It begins with sums of all parts; in each step it
/// sends away the half of its remaining parts that is farther behind `me`. The results return in the reverse order.
void HalvingExchange::exchange(Flight& flight) {
  const bool is_sum = flight.step < rounds_.size();
  const Round round = rounds_[is_sum ? flight.step : 2 * rounds_.size() - 1 - flight.step];
  const Rank ahead = ranks_[(me_ + round.distance) % size_];
  const Rank behind = ranks_[(me_ + size_ - round.distance) % size_];
  const Parts kept{me_, round.parts};
  const Parts given{me_ + round.distance, round.parts};
  if (is_sum) {
    exchange_sums(flight, ahead, given, behind, kept);
  } else {
    exchange_results(flight, behind, kept, ahead, given);
  }
}

void HalvingExchange::take(const Flight& flight) {
  if (flight.step >= rounds_.size()) return;
  add(flight, {me_, rounds_[flight.step].parts});
  if (flight.step + 1 == rounds_.size()) finish(flight, me_);
}

}  // namespace sparkhvd
