// The steps of island_allreduce between islands: ranks with the same local
// index, one per island, add up the partial results of their slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collectives/collectives.h"

namespace sparkhvd {

/// The ranks with this rank's local index, by island.
std::vector<Rank> lane_of(const Team& team);
/// Part `index` of a slice, in bytes of the tensors.
Range part_of_slice(Range slice, std::size_t parts, std::size_t index, std::size_t element);

/// Direct exchange: island i owns part i of each slice, receives it from the
/// others, adds in the order of the islands and sends the result to the others.
/// Several chunks may be in flight at once. All ranks must run the same steps in
/// the same order, because a connection carries no tags.
class DirectExchange {
 public:
  /// `window`: chunks at once. `slice_elements`: of the largest slice.
  /// `is_raw`: parts are sent from the tensors without a local sum, so prescale
  /// is applied later.
  DirectExchange(Context& context, std::size_t window, std::size_t slice_elements, bool is_raw);

  /// `slice`: bytes of the tensors. `partial`: its partial results, lent until
  /// `parts_sent`; nullptr: the tensors themselves.
  void send_parts(std::uint64_t chunk, Range slice, const std::byte* partial);
  Transfers::Done parts_received(std::uint64_t chunk) const;
  Transfers::Done parts_sent(std::uint64_t chunk) const;
  /// Adds up this rank's part after all are received, and sends the result.
  void combine(std::uint64_t chunk);
  /// The whole slice of the result is in the tensors.
  Transfers::Done results_received(std::uint64_t chunk) const;
  Transfers::Done results_sent(std::uint64_t chunk) const;

 private:
  struct Flight {
    Transfers parts;
    Transfers results;
    Range slice;
    const std::byte* partial;
  };
  Flight& flight(std::uint64_t chunk) { return flights_[chunk % flights_.size()]; }
  const Flight& flight(std::uint64_t chunk) const { return flights_[chunk % flights_.size()]; }
  Range part(const Flight& flight, std::size_t island) const noexcept;
  std::byte* place(std::uint64_t chunk, std::size_t island) const noexcept;

  Context& context_;
  const Pieces& pieces_;
  DType dtype_;
  bool is_raw_;
  std::size_t element_;
  std::size_t unit_;  // bytes of an element on the wire to the owner
  std::size_t me_;
  std::vector<Rank> ranks_;  // by island
  std::size_t part_bytes_;   // of the largest part, on the wire
  std::unique_ptr<std::byte[]> incoming_;
  std::vector<Flight> flights_;
  std::vector<const void*> sources_;
};

}  // namespace sparkhvd
