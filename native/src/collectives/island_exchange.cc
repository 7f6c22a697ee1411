#include "collectives/island_exchange.h"

namespace sparkhvd {

std::vector<Rank> lane_of(const Team& team) {
  std::vector<Rank> ranks;
  for (const auto& island : team.islands()) ranks.push_back(island[team.local_index()]);
  return ranks;
}

Range part_of_slice(Range slice, std::size_t parts, std::size_t index, std::size_t element) {
  const Range range = part_of(slice.size / element, parts, index, element);
  return {slice.begin + range.begin * element, range.size * element};
}
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
    // If the tensors are in place, the result overwrites input that is in flight to the owner of the part. This is
    // safe, because the owner sends the result only after it has received this input.
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

}  // namespace sparkhvd
