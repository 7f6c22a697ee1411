// The steps of island_allreduce between islands. Ranks with the same local index, one per island, add up the partial
// results of their slice. These ranks are called a lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collectives/collectives.h"

namespace sparkhvd {

/// The ranks of this rank's lane (with the same local index), by island.
std::vector<Rank> lane_of(const Team& team);
/// Range of part `index` of a slice, in bytes of the tensors.
Range part_of_slice(Range slice, std::size_t parts, std::size_t index, std::size_t element);

/// Direct exchange. The rank of island i owns part i of each slice: it receives this part from the other ranks of the
/// lane, adds it up in the order of the islands, and sends the result to the other ranks. Several chunks may be in
/// flight at once. All ranks must run the same steps in the same order, because a connection carries no tags.
class DirectExchange {
 public:
  /// `window`: largest number of chunks in flight. `slice_elements`: elements of the largest slice. `is_raw`: parts are
  /// sent from the tensors without a local sum, so prescale is applied later.
  DirectExchange(Context& context, std::size_t window, std::size_t slice_elements, bool is_raw);

  /// Sends the parts of a slice to their owners. `slice`: range in bytes of the tensors. `partial`: the partial results
  /// of the slice, lent until `parts_sent`; nullptr if the tensors themselves are sent.
  void send_parts(std::uint64_t chunk, Range slice, const std::byte* partial);
  Transfers::Done parts_received(std::uint64_t chunk) const;
  Transfers::Done parts_sent(std::uint64_t chunk) const;
  /// Adds up this rank's part and sends the result. Call it after `parts_received` holds.
  void combine(std::uint64_t chunk);
  /// Holds when the whole slice of the result is in the tensors.
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
  std::size_t unit_;  // bytes of an element that is sent to the owner
  std::size_t me_;
  std::vector<Rank> ranks_;  // by island
  std::size_t part_bytes_;   // bytes of the largest part that is sent to an owner
  std::unique_ptr<std::byte[]> incoming_;
  std::vector<Flight> flights_;
  std::vector<const void*> sources_;
};

}  // namespace sparkhvd
