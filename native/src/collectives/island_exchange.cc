#include "collectives/island_exchange.h"

namespace sparkhvd {
namespace {

/// The ranks with this rank's local index.
std::vector<Rank> lane_of(const Team& team) {
  std::vector<Rank> ranks;
  for (const auto& island : team.islands()) ranks.push_back(island[team.local_index()]);
  return ranks;
}

/// Part `index` of a slice, in bytes of the tensors.
Range part_of_slice(Range slice, std::size_t parts, std::size_t index, std::size_t element) {
  const Range range = part_of(slice.size / element, parts, index, element);
  return {slice.begin + range.begin * element, range.size * element};
}

}  // namespace

DirectExchange::DirectExchange(Context& context, std::size_t window, std::size_t slice_elements,
                               bool is_raw)
    : context_(context),
      pieces_(context.operation.pieces),
      dtype_(context.operation.descriptor.dtype),
      is_raw_(is_raw),
      element_(element_size(dtype_)),
      unit_(is_raw ? element_ : element_size(accumulation_type(dtype_))),
      me_(context.team.island_index()),
      ranks_(lane_of(context.team)),
      part_bytes_(part_of(slice_elements, ranks_.size(), 0, element_).size * unit_),
      incoming_(std::make_unique_for_overwrite<std::byte[]>(window * ranks_.size() * part_bytes_)),
      flights_(window, Flight{Transfers(context.communicator), Transfers(context.communicator),
                              Range{}, nullptr}),
      sources_(ranks_.size()) {}

Range DirectExchange::part(const Flight& flight, std::size_t island) const noexcept {
  return part_of_slice(flight.slice, ranks_.size(), island, element_);
}

std::byte* DirectExchange::place(std::uint64_t chunk, std::size_t island) const noexcept {
  return incoming_.get() + (chunk % flights_.size() * ranks_.size() + island) * part_bytes_;
}

void DirectExchange::send_parts(std::uint64_t chunk, Range slice, const std::byte* partial) {
  Flight& now = flight(chunk);
  now = {Transfers(context_.communicator), Transfers(context_.communicator), slice, partial};
  const std::size_t own_bytes = part(now, me_).size / element_ * unit_;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (i == me_) continue;
    now.parts.receive(ranks_[i], {place(chunk, i), own_bytes});
    const Range theirs = part(now, i);
    if (partial != nullptr) {
      now.parts.send(ranks_[i], {partial + (theirs.begin - slice.begin) / element_ * unit_,
                                 theirs.size / element_ * unit_});
      continue;
    }
    pieces_.for_range(theirs.begin, theirs.size, [&](const Pieces::Part& piece) {
      now.parts.send(ranks_[i], {piece.input, piece.bytes});
    });
  }
}

Transfers::Done DirectExchange::parts_received(std::uint64_t chunk) const {
  return flight(chunk).parts.all_received();
}

Transfers::Done DirectExchange::parts_sent(std::uint64_t chunk) const {
  return flight(chunk).parts.all_sent();
}

void DirectExchange::combine(std::uint64_t chunk) {
  Flight& now = flight(chunk);
  const Range own = part(now, me_);
  const ReduceOp op = kernel_op(context_);
  const Scaling scaling = scaling_of(context_);
  pieces_.for_range(own.begin, own.size, [&](const Pieces::Part& piece) {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      sources_[i] = place(chunk, i) + piece.offset / element_ * unit_;
    }
    sources_[me_] =
        now.partial == nullptr
            ? piece.input
            : now.partial + (own.begin - now.slice.begin + piece.offset) / element_ * unit_;
    const std::size_t count = piece.bytes / element_;
    if (is_raw_) {
      context_.kernels.reduce(dtype_, op, piece.output, sources_, count, scaling);
    } else {
      context_.kernels.finish(dtype_, op, piece.output, sources_, count, scaling);
    }
  });
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (i == me_) continue;
    pieces_.for_range(own.begin, own.size, [&](const Pieces::Part& piece) {
      now.results.send(ranks_[i], {piece.output, piece.bytes});
    });
    // In place this overwrites input that is on its way to the owner: its
    // result comes only after it has received all of that input.
    const Range theirs = part(now, i);
    pieces_.for_range(theirs.begin, theirs.size, [&](const Pieces::Part& piece) {
      now.results.receive(ranks_[i], {piece.output, piece.bytes});
    });
  }
}

Transfers::Done DirectExchange::results_received(std::uint64_t chunk) const {
  return flight(chunk).results.all_received();
}

Transfers::Done DirectExchange::results_sent(std::uint64_t chunk) const {
  return flight(chunk).results.all_sent();
}

RingExchange::RingExchange(Context& context, std::size_t window, std::size_t slice_elements)
    : context_(context),
      pieces_(context.operation.pieces),
      dtype_(context.operation.descriptor.dtype),
      wide_(accumulation_type(dtype_)),
      element_(element_size(dtype_)),
      size_(context.team.islands().size()),
      me_(context.team.island_index()),
      next_(context.team.islands()[(me_ + 1) % size_][context.team.local_index()]),
      previous_(context.team.islands()[(me_ + size_ - 1) % size_][context.team.local_index()]),
      part_bytes_(part_of(slice_elements, size_, 0, element_).size * element_size(wide_)),
      incoming_(std::make_unique_for_overwrite<std::byte[]>(window * part_bytes_)),
      flights_(window, Flight{Transfers(context.communicator), Transfers(context.communicator),
                              Range{}, nullptr, 0}) {}

Range RingExchange::part(const Flight& flight, std::size_t index) const noexcept {
  return part_of_slice(flight.slice, size_, index % size_, element_);
}

std::span<std::byte> RingExchange::partial_of(const Flight& flight,
                                              std::size_t index) const noexcept {
  const Range range = part(flight, index);
  const std::size_t wide = element_size(wide_);
  return {flight.partial + (range.begin - flight.slice.begin) / element_ * wide,
          range.size / element_ * wide};
}

void RingExchange::start(std::uint64_t chunk, Range slice, std::byte* partial) {
  flight(chunk) = {Transfers(context_.communicator), Transfers(context_.communicator), slice,
                   partial, 0};
  end_ = chunk + 1;
  exchange(chunk);
}

Transfers::Done RingExchange::arrived(std::uint64_t chunk) const {
  return flight(chunk).arriving.all_received();
}

Transfers::Done RingExchange::sent(std::uint64_t chunk) const {
  return flight(chunk).leaving.all_sent();
}

void RingExchange::advance(std::uint64_t chunk) {
  Flight& now = flight(chunk);
  if (now.step + 1 < size_) add(chunk);
  if (now.step + 2 == size_) finish(now);
  if (++now.step < steps(size_)) {
    exchange(chunk);
  } else {
    oldest_ = chunk + 1;
  }
}

/// What goes to the next neighbour in this step, and comes from the one before:
/// first sums of parts, one more addend at each rank, then results.
void RingExchange::exchange(std::uint64_t chunk) {
  Flight& now = flight(chunk);
  now.arriving = Transfers(context_.communicator);
  const std::size_t sums = size_ - 1;
  if (now.step < sums) {
    const std::size_t leaving = me_ + size_ - now.step;
    now.arriving.receive(previous_, {incoming(chunk), partial_of(now, leaving - 1).size()});
    now.leaving.send(next_, partial_of(now, leaving));
    return;
  }
  const std::size_t arriving = me_ + size_ - (now.step - sums);
  const Range here = part(now, arriving);
  pieces_.for_range(here.begin, here.size, [&](const Pieces::Part& piece) {
    now.arriving.receive(previous_, {piece.output, piece.bytes});
  });
  const Range there = part(now, arriving + 1);
  pieces_.for_range(there.begin, there.size, [&](const Pieces::Part& piece) {
    now.leaving.send(next_, {piece.output, piece.bytes});
  });
}

void RingExchange::add(std::uint64_t chunk) {
  const Flight& now = flight(chunk);
  const auto own = partial_of(now, me_ + size_ - now.step - 1);
  const void* sources[] = {incoming(chunk), own.data()};
  context_.kernels.reduce(wide_, kernel_op(context_), own.data(), sources,
                          own.size() / element_size(wide_), Scaling{});
}

/// The part that has all addends now.
void RingExchange::finish(const Flight& flight) const {
  const std::size_t owned = me_ + 1;
  const Range range = part(flight, owned);
  pieces_.for_range(range.begin, range.size, [&](const Pieces::Part& piece) {
    const void* total[] = {partial_of(flight, owned).data() +
                           piece.offset / element_ * element_size(wide_)};
    context_.kernels.finish(dtype_, kernel_op(context_), piece.output, total,
                            piece.bytes / element_, scaling_of(context_));
  });
}

}  // namespace sparkhvd
