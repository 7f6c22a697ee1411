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

/// Everyone exchanges with everyone: of each slice, island i owns part i,
/// receives it from the others, adds in the order of the islands and sends the
/// result to the others. Several chunks may be on their way at once; everyone
/// must do the same steps in the same order, because a connection carries no
/// tags.
class DirectExchange {
 public:
  /// `window`: chunks at once. `slice_elements`: of the largest slice.
  /// `is_raw`: parts travel as they are in the tensors and are not added up
  /// yet, so prescale is still to be applied.
  DirectExchange(Context& context, std::size_t window, std::size_t slice_elements, bool is_raw);

  /// `slice`: bytes of the tensors. `partial`: its partial results, lent until
  /// `parts_sent`; nullptr: the tensors themselves.
  void send_parts(std::uint64_t chunk, Range slice, const std::byte* partial);
  Transfers::Done parts_received(std::uint64_t chunk) const;
  Transfers::Done parts_sent(std::uint64_t chunk) const;
  /// Adds up the own part once all are received, and sends the result.
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
  std::size_t unit_;  // bytes of an element on its way to the owner
  std::size_t me_;
  std::vector<Rank> ranks_;  // by island
  std::size_t part_bytes_;   // of the largest part, on its way
  std::unique_ptr<std::byte[]> incoming_;
  std::vector<Flight> flights_;
  std::vector<const void*> sources_;
};

/// The same for many islands, where messages would get short: 2(P-1) steps to
/// the next neighbour (ring; Patarasuk & Yuan, JPDC 2009,
/// doi:10.1016/j.jpdc.2008.09.002), of several chunks by turns, so that a
/// connection always has work. A part is added up along the ring, so its order
/// of addends starts behind its owner.
class RingExchange {
 public:
  /// `window`, `slice_elements`: as of DirectExchange.
  RingExchange(Context& context, std::size_t window, std::size_t slice_elements);
  /// Steps of a chunk.
  static std::size_t steps(std::size_t islands) noexcept { return 2 * (islands - 1); }

  /// `partial` is overwritten, and lent until `sent`.
  void start(std::uint64_t chunk, Range slice, std::byte* partial);
  /// The chunks that have begun and not had all their steps: [oldest, end).
  /// Everyone must let them make their steps in the same order, this one: all
  /// by turns, the oldest first.
  std::uint64_t oldest() const noexcept { return oldest_; }
  std::uint64_t end() const noexcept { return end_; }
  Transfers::Done arrived(std::uint64_t chunk) const;
  /// One step, once what the neighbour has sent for it has arrived.
  void advance(std::uint64_t chunk);
  Transfers::Done sent(std::uint64_t chunk) const;

 private:
  struct Flight {
    Transfers arriving;  // of this step
    Transfers leaving;
    Range slice;
    std::byte* partial;
    std::size_t step;
  };
  Flight& flight(std::uint64_t chunk) { return flights_[chunk % flights_.size()]; }
  const Flight& flight(std::uint64_t chunk) const { return flights_[chunk % flights_.size()]; }
  Range part(const Flight& flight, std::size_t index) const noexcept;
  std::span<std::byte> partial_of(const Flight& flight, std::size_t index) const noexcept;
  std::byte* incoming(std::uint64_t chunk) const noexcept {
    return incoming_.get() + chunk % flights_.size() * part_bytes_;
  }
  void exchange(std::uint64_t chunk);
  void add(std::uint64_t chunk);
  void finish(const Flight& flight) const;

  Context& context_;
  const Pieces& pieces_;
  DType dtype_;
  DType wide_;
  std::size_t element_;
  std::size_t size_;
  std::size_t me_;
  Rank next_;
  Rank previous_;
  std::size_t part_bytes_;
  std::unique_ptr<std::byte[]> incoming_;
  std::vector<Flight> flights_;
  std::uint64_t oldest_ = 0;
  std::uint64_t end_ = 0;
};

}  // namespace sparkhvd
