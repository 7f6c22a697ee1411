// Exchanges between many islands, where all-to-all messages would be short: a chunk takes several steps. In each step a
// rank sends to one other rank and receives from one. Several chunks alternate, so that a connection is never idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "collectives/island_exchange.h"

namespace sparkhvd {

class SteppedExchange {
 public:
  SteppedExchange(const SteppedExchange&) = delete;
  SteppedExchange& operator=(const SteppedExchange&) = delete;
  virtual ~SteppedExchange() = default;

  /// `slice`: bytes of the tensors. `partial`: its partial results, overwritten, and lent until `sent`.
  void start(std::uint64_t chunk, Range slice, std::byte* partial);
  /// The chunks with remaining steps: [oldest, end). All ranks must run their steps in the same order, because a
  /// connection carries no tags: round-robin, the oldest first.
  std::uint64_t oldest() const noexcept { return oldest_; }
  std::uint64_t end() const noexcept { return end_; }
  Transfers::Done arrived(std::uint64_t chunk) const;
  /// One step, after its data has arrived.
  void advance(std::uint64_t chunk);
  Transfers::Done sent(std::uint64_t chunk) const;

 protected:
  struct Flight {
    Transfers arriving;  // of this step
    Transfers leaving;
    Range slice;
    std::byte* partial;
    std::size_t step;
    std::byte* incoming;
  };

  /// `window`: chunks at once. `slice_elements`: of the largest slice. `parts_at_once`: received in a step.
  SteppedExchange(Context& context, std::size_t window, std::size_t slice_elements,
                  std::size_t steps, std::size_t parts_at_once);

  /// Posts the sends and receives of this step.
  virtual void exchange(Flight& flight) = 0;
  /// Processes the received data.
  virtual void take(const Flight& flight) = 0;

  /// Parts of a slice, one after the other and around its end.
  struct Parts {
    std::size_t first;
    std::size_t count;
  };
  /// Sends sums of these parts, and receives sums of others.
  void exchange_sums(Flight& flight, Rank to, Parts leaving, Rank from, Parts arriving) const;
  /// Adds the received sums to this rank's.
  void add(const Flight& flight, Parts arrived) const;
  /// The part has all addends now: the result.
  void finish(const Flight& flight, std::size_t part) const;
  void exchange_results(Flight& flight, Rank to, Parts leaving, Rank from, Parts arriving) const;

  const std::size_t size_;
  const std::size_t me_;
  const std::vector<Rank> ranks_;

 private:
  template <class Use>
  void for_runs(const Flight& flight, Parts parts, Use use) const;
  std::span<std::byte> partial_of(const Flight& flight, Range run) const noexcept;
  Flight& flight(std::uint64_t chunk) { return flights_[chunk % flights_.size()]; }
  const Flight& flight(std::uint64_t chunk) const { return flights_[chunk % flights_.size()]; }

  Context& context_;
  const Pieces& pieces_;
  const DType dtype_;
  const DType wide_;
  const std::size_t element_;
  const std::size_t steps_;
  const std::size_t incoming_bytes_;
  const std::unique_ptr<std::byte[]> incoming_;
  std::vector<Flight> flights_;
  std::uint64_t oldest_ = 0;
  std::uint64_t end_ = 0;
};

/// 2(P-1) steps to the next neighbour (ring; Patarasuk and Yuan, JPDC 2009, doi:10.1016/j.jpdc.2008.09.002), for many
/// bytes. A part is added up along the ring, so its order of addends starts behind its owner.
class RingExchange final : public SteppedExchange {
 public:
  static std::size_t steps(std::size_t islands) noexcept { return 2 * (islands - 1); }
  RingExchange(Context& context, std::size_t window, std::size_t slice_elements);

 private:
  void exchange(Flight& flight) override;
  void take(const Flight& flight) override;
};

/// 2 log2 P steps, rounded up, over distances that halve, and double again for the results (Traeff, "Optimal,
/// non-pipelined reduce-scatter and allreduce algorithms", arXiv:2410.14234): as halving and doubling, for any P.
class HalvingExchange final : public SteppedExchange {
 public:
  static std::size_t steps(std::size_t islands) noexcept;
  HalvingExchange(Context& context, std::size_t window, std::size_t slice_elements);

 private:
  /// A step's distance, and its number of parts.
  struct Round {
    std::size_t distance;
    std::size_t parts;
  };
  static std::vector<Round> rounds_of(std::size_t islands);
  void exchange(Flight& flight) override;
  void take(const Flight& flight) override;

  const std::vector<Round> rounds_;
};

}  // namespace sparkhvd
