// Exchanges between many islands, for which the messages of a direct exchange would be short. A chunk takes several
// steps. In each step a rank sends to one rank and receives from one rank. Several chunks alternate, so that a
// connection is never idle.
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

  /// Starts a chunk. `slice`: range in bytes of the tensors. `partial`: the partial results of the slice; the exchange
  /// overwrites them, and they are lent until `sent`.
  void start(std::uint64_t chunk, Range slice, std::byte* partial);
  // The chunks from `oldest` to `end` (exclusive) have remaining steps. All ranks must run these steps in the same
  // order, because a connection carries no tags: round-robin, beginning with the oldest chunk.
  std::uint64_t oldest() const noexcept { return oldest_; }
  std::uint64_t end() const noexcept { return end_; }
  Transfers::Done arrived(std::uint64_t chunk) const;
  /// Does one step of a chunk. Call it after `arrived` holds.
  void advance(std::uint64_t chunk);
  Transfers::Done sent(std::uint64_t chunk) const;

 protected:
  struct Flight {
    Transfers arriving;  // receives of the current step
    Transfers leaving;
    Range slice;
    std::byte* partial;
    std::size_t step;
    std::byte* incoming;
  };

  /// `window`: largest number of chunks in flight. `slice_elements`: elements of the largest slice. `parts_at_once`:
  /// largest number of parts received in a step.
  SteppedExchange(Context& context, std::size_t window, std::size_t slice_elements,
                  std::size_t steps, std::size_t parts_at_once);

  /// Posts the sends and receives of this step.
  virtual void exchange(Flight& flight) = 0;
  /// Processes the received data of this step.
  virtual void take(const Flight& flight) = 0;

  /// Consecutive parts of a slice; after the last part they continue with part 0.
  struct Parts {
    std::size_t first;
    std::size_t count;
  };
  /// Sends the sums of the parts `leaving`, and receives the sums of the parts `arriving`.
  void exchange_sums(Flight& flight, Rank to, Parts leaving, Rank from, Parts arriving) const;
  /// Adds the received sums to this rank's.
  void add(const Flight& flight, Parts arrived) const;
  /// Computes the result of a part that has all addends.
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

/// Ring exchange: 2(P-1) steps, each to the next neighbour, for many bytes (Patarasuk and Yuan, JPDC 2009,
/// doi:10.1016/j.jpdc.2008.09.002). A part is added up along the ring, beginning at the rank behind its owner.
class RingExchange final : public SteppedExchange {
 public:
  static std::size_t steps(std::size_t islands) noexcept { return 2 * (islands - 1); }
  RingExchange(Context& context, std::size_t window, std::size_t slice_elements);

 private:
  void exchange(Flight& flight) override;
  void take(const Flight& flight) override;
};

/// Halving and doubling for any P: 2 ceil(log2 P) steps. The distance between sender and receiver halves for the sums,
/// and doubles for the results (Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms",
/// arXiv:2410.14234).
class HalvingExchange final : public SteppedExchange {
 public:
  static std::size_t steps(std::size_t islands) noexcept;
  HalvingExchange(Context& context, std::size_t window, std::size_t slice_elements);

 private:
  /// Distance of a step, and the number of parts that it sends.
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
