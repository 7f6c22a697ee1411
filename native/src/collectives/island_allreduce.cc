// Allreduce over several islands. Chunks of the tensors pass through a pipeline. A rank does these steps:
//   copy in   copies the slices that its island peers reduce into its slot
//   reduce    reduces its own slice from its tensor and the peers' slots
//   exchange  exchanges the partial result with the ranks of the other islands that have the same slice
//             (island_exchange.h); the result is then in its tensor
//   pass on   copies its slice of the result into its slot, for the island peers
//   copy out  copies the other slices of the result from the island peers' slots
// There are as many slices as the smallest island has ranks. Further ranks of larger islands only copy in and out. A
// rank that is alone in its island only exchanges. If the tensors are in registered memory, ranks read and write the
// buffers of their island peers instead of slots.
//
// Slots: step s fills slot number 2s with input and slot number 2s + 1 with results. So many chunks can be in flight
// between islands, while a few slots are enough inside an island.
#include <algorithm>
#include <cstring>
#include <memory>

#include "collectives/claims.h"
#include "collectives/island_exchange.h"
#include "collectives/stepped_exchange.h"

namespace sparkhvd {
namespace {

// Number of further chunks in flight while a chunk is added up, so that a connection is never idle in either direction.
constexpr std::uint64_t kPartsAhead = 3;
// If results are passed on inside the island: number of further chunks with results in flight while the oldest chunk is
// waited for.
constexpr std::uint64_t kResultsAhead = 1;
// Bytes of a part from one rank to another if slots do not limit them. Larger parts are slower: over loopback 16 MiB
// took 7.5 ms with 128 KiB, 11.7 ms with 256 KiB and 15.4 ms with 512 KiB, because the buffers of the sockets and of
// the exchange no longer fit into the cache.
constexpr std::size_t kMinPartBytes = 32 << 10;
constexpr std::size_t kMaxPartBytes = 128 << 10;
// Limits of a ring. At least kRingChunks chunks alternate, and more if slots make the parts short. Each chunk costs
// memory for P parts.
constexpr std::size_t kRingChunks = 4;
constexpr std::size_t kRingBytesAhead = 512 << 10;
constexpr std::size_t kMaxRingPartBytes = 256 << 10;

/// How the tensors are cut into chunks, and the steps of the pipeline. Equal on all ranks of the team, and on the ranks
/// of its islands that have joined.
struct Pipeline {
  Pipeline(const Communicator& communicator, const Team& team, const Descriptor& descriptor,
           const Execute& agreed)
      : element(element_size(descriptor.dtype)), bytes(total_bytes(descriptor)) {
    is_stepped = team.islands().size() > communicator.knobs().direct_ranks;
    is_halving = is_stepped && bytes / (team.num_lanes() * team.islands().size()) <= kMinPartBytes;
    is_registered = !agreed.places.empty();
    has_slots = !is_registered && !team.is_all_alone();
    results_ahead = is_stepped || team.is_all_alone() ? 0 : kResultsAhead;
    // With 2 slots a slot must be read before the next slot can be filled, so the steps cannot overlap.
    slot_lag = has_slots && communicator.num_slots() > 2 ? 1 : 0;
    if (has_slots) {
      chunk_bytes = communicator.knobs().chunk_bytes / element * element;
    } else {
      const std::size_t parts = team.num_lanes() * team.islands().size();
      // With more islands the parts are smaller, because a rank uses more connections at once.
      const std::size_t most = std::max(2 * kMaxPartBytes / team.islands().size(), kMinPartBytes);
      const std::size_t part_bytes =
          is_stepped ? std::clamp(bytes / parts / kRingChunks, kMinPartBytes, kMaxRingPartBytes)
                     : std::clamp(bytes / parts / (2 * kPartsAhead), kMinPartBytes, most);
      chunk_bytes = part_bytes / 64 * 64 * parts;
    }
    chunks = (bytes + chunk_bytes - 1) / chunk_bytes;
    parts_ahead = kPartsAhead;
    if (is_stepped) {
      const std::size_t part_bytes = chunk_bytes / (team.num_lanes() * team.islands().size());
      const std::size_t islands = team.islands().size();
      const std::size_t needed =
          is_halving ? HalvingExchange::steps(islands) : RingExchange::steps(islands);
      const std::size_t most = std::max(kRingChunks, kRingBytesAhead / std::max(part_bytes, 1UL));
      exchange_steps = chunks <= most ? 1 : (needed + most - 1) / most;
      parts_ahead = (needed + exchange_steps - 1) / exchange_steps - 1;
    }
    steps = chunks + parts_ahead + results_ahead + 2 * slot_lag;
  }

  std::size_t element;
  std::size_t bytes;
  bool is_stepped;  // false: every rank exchanges with all other ranks of its lane directly
  bool is_halving;  // halving and doubling in place of a ring, because its messages would be short
  bool is_registered;
  bool has_slots;
  std::uint64_t parts_ahead;
  std::size_t exchange_steps = 0;  // steps of a chunk in flight between the starts of two chunks
  std::uint64_t results_ahead;
  std::uint64_t slot_lag;
  std::size_t chunk_bytes;
  std::uint64_t chunks;
  std::uint64_t steps;
};

/// Work of a rank inside its island.
class Inside {
 public:
  Inside(const Context& context, const Pipeline& plan)
      : context_(context),
        communicator_(context.communicator),
        team_(context.team),
        pieces_(context.operation.pieces),
        plan_(plan),
        dtype_(context.operation.descriptor.dtype),
        accumulator_(element_size(accumulation_type(dtype_))),
        first_(communicator_.next_chunk()),
        sources_(team_.local_size()) {
    if (plan.is_registered) {
      for (const Rank local_peer : team_.island()) {
        buffers_.push_back(context.operation.registered[team_.index_in(local_peer)]);
      }
    }
  }

  std::size_t lanes() const noexcept { return team_.num_lanes(); }
  bool has_lane() const noexcept { return team_.local_index() < lanes(); }
  bool uses_slots() const noexcept { return plan_.has_slots && team_.local_size() > 1; }
  /// True if there is nothing to add up or convert inside the island, so the tensors themselves can be sent.
  bool is_partial_needless() const noexcept {
    return team_.local_size() == 1 && !plan_.is_stepped &&
           (team_.is_all_alone() || (accumulator_ == plan_.element && has_no_prescale()));
  }
  std::size_t largest_slice() const noexcept {
    const std::size_t elements = std::min(plan_.chunk_bytes, plan_.bytes) / plan_.element;
    return part_of(elements, lanes(), 0, plan_.element).size;
  }
  Range slice(std::uint64_t chunk, std::size_t lane) const noexcept {
    const std::size_t begin = chunk * plan_.chunk_bytes;
    const std::size_t bytes = std::min(plan_.chunk_bytes, plan_.bytes - begin);
    const Range elements = part_of(bytes / plan_.element, lanes(), lane, plan_.element);
    return {begin + elements.begin * plan_.element, elements.size * plan_.element};
  }
  Range own_slice(std::uint64_t chunk) const noexcept { return slice(chunk, team_.local_index()); }

  std::uint64_t input_number(std::uint64_t step) const noexcept { return first_ + 2 * step; }
  std::uint64_t result_number(std::uint64_t step) const noexcept { return first_ + 2 * step + 1; }

  void copy_in(std::uint64_t chunk, std::uint64_t number) const {
    std::byte* slot = communicator_.own_slot(number);
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      if (lane == team_.local_index()) continue;
      const Range range = slice(chunk, lane);
      pieces_.read(range.begin, {slot + in_slot(chunk, range.begin), range.size});
    }
    communicator_.publish(Stage::kCopiedIn, number + 1);
  }

  void reduce(std::uint64_t chunk, std::uint64_t number, std::byte* partial) {
    const Range own = own_slice(chunk);
    const std::size_t me = team_.local_index();
    pieces_.for_range(own.begin, own.size, [&](const Pieces::Part& part) {
      const std::size_t begin = own.begin + part.offset;
      for (std::size_t local = 0; local < sources_.size(); ++local) {
        if (local == me) {
          sources_[local] = part.input;
        } else if (plan_.is_registered) {
          sources_[local] = buffers_[local] + begin;
        } else {
          sources_[local] =
              communicator_.slot(team_.island()[local], number) + in_slot(chunk, begin);
        }
      }
      context_.kernels.reduce_partial(dtype_, kernel_op(context_),
                                      partial + part.offset / plan_.element * accumulator_,
                                      sources_, part.bytes / plan_.element, scaling_of(context_));
    });
  }

  void hand_on(std::uint64_t chunk, std::uint64_t number) const {
    if (has_lane()) {
      const Range own = own_slice(chunk);
      std::byte* place = communicator_.own_slot(number) + in_slot(chunk, own.begin);
      read_result(own.begin, {place, own.size});
    }
    communicator_.publish(Stage::kReduced, number + 1);
  }

  void copy_out(std::uint64_t chunk, std::uint64_t number) const {
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      if (lane == team_.local_index()) continue;
      const Range range = slice(chunk, lane);
      const std::byte* slot = communicator_.slot(team_.island()[lane], number);
      pieces_.write(range.begin, {slot + in_slot(chunk, range.begin), range.size});
    }
  }

  /// Stores this rank's slice of the result to all buffers of the island, in registered memory.
  void store(std::uint64_t chunk) const {
    const Range own = own_slice(chunk);
    for (std::size_t local = 0; local < buffers_.size(); ++local) {
      if (local == team_.local_index()) continue;
      read_result(own.begin, {buffers_[local] + own.begin, own.size});
    }
  }

 private:
  std::size_t in_slot(std::uint64_t chunk, std::size_t begin) const noexcept {
    return begin - chunk * plan_.chunk_bytes;
  }
  bool has_no_prescale() const noexcept { return context_.operation.descriptor.prescale == 1; }
  void read_result(std::size_t begin, std::span<std::byte> target) const {
    pieces_.for_range(begin, target.size(), [&](const Pieces::Part& part) {
      std::memcpy(target.data() + part.offset, part.output, part.bytes);
    });
  }

  const Context& context_;
  Communicator& communicator_;
  const Team& team_;
  const Pieces& pieces_;
  const Pipeline& plan_;
  DType dtype_;
  std::size_t accumulator_;
  std::uint64_t first_;
  std::vector<std::byte*> buffers_;  // by local index
  std::vector<const void*> sources_;
};

/// Waits until every rank of the island has stored its slices to all buffers, in registered memory.
Task wait_for_local_peers(Context& context) {
  const TaggedCount done(
      context.communicator.claim(context.team.island()[0], context.agreed.sequence).done,
      context.agreed.sequence);
  done.add_one();
  context.communicator.ring();
  co_await AllCounted(done, context.team.local_size(), context.team);
}

}  // namespace

std::uint64_t island_allreduce_chunks(const Communicator& communicator, const Team& team,
                                      const Descriptor& descriptor, const Execute& agreed) {
  const Pipeline plan(communicator, team, descriptor, agreed);
  return plan.has_slots ? 2 * plan.steps : 0;
}

Task island_allreduce(Context& context) {
  Communicator& communicator = context.communicator;
  const Pipeline plan(communicator, context.team, context.operation.descriptor, context.agreed);
  Inside inside(context, plan);
  context.algorithm = plan.is_halving               ? "halving"
                      : plan.is_stepped             ? "ring"
                      : context.team.is_all_alone() ? "direct"
                                                    : "islands";
  const bool uses_slots = inside.uses_slots();
  const bool uses_claims = plan.is_registered && context.team.local_size() > 1;
  if (uses_claims) co_await communicator.claim_is_free(context.agreed.sequence);
  if (plan.has_slots && communicator.has_memory()) {
    communicator.advance_chunks(2 * plan.steps);
    if (!uses_slots) publish_all(communicator);
  }

  // Chunks in flight at once: one more than the chunks that start between the first and the last step of a chunk.
  const std::uint64_t window = std::min(plan.parts_ahead + plan.results_ahead + 1, plan.chunks);
  const std::size_t slice_elements = inside.largest_slice();
  const std::size_t partial_bytes =
      slice_elements * element_size(accumulation_type(context.operation.descriptor.dtype));
  std::unique_ptr<std::byte[]> partials;
  if (inside.has_lane() && !inside.is_partial_needless()) {
    partials = std::make_unique_for_overwrite<std::byte[]>(window * partial_bytes);
  }
  std::unique_ptr<DirectExchange> direct;
  std::unique_ptr<SteppedExchange> stepped;
  if (inside.has_lane() && plan.is_halving) {
    stepped = std::make_unique<HalvingExchange>(context, window, slice_elements);
  } else if (inside.has_lane() && plan.is_stepped) {
    stepped = std::make_unique<RingExchange>(context, window, slice_elements);
  } else if (inside.has_lane()) {
    direct = std::make_unique<DirectExchange>(context, window, slice_elements,
                                              context.team.is_all_alone());
  }
  const auto partial = [&](std::uint64_t chunk) {
    return partials ? partials.get() + chunk % window * partial_bytes : nullptr;
  };
  const auto exists = [&](std::uint64_t step, std::uint64_t lag) {
    return step >= lag && step - lag < plan.chunks;
  };

  for (std::uint64_t step = 0; step < plan.steps; ++step) {
    if (uses_slots && exists(step, 0)) {
      co_await slot_is_free(communicator, inside.input_number(step));
      inside.copy_in(step, inside.input_number(step));
    }
    std::uint64_t lag = plan.slot_lag;
    if (exists(step, lag) && inside.has_lane()) {
      const std::uint64_t chunk = step - lag;
      const std::uint64_t number = inside.input_number(chunk);
      if (uses_slots) co_await communicator.reached(context.team, Stage::kCopiedIn, number + 1);
      if (direct && chunk >= window) {
        co_await direct->parts_sent(chunk - window);
        co_await direct->results_received(chunk - window);
        co_await direct->results_sent(chunk - window);
      }
      if (stepped && chunk >= window) co_await stepped->sent(chunk - window);
      if (partials) inside.reduce(chunk, number, partial(chunk));
      if (stepped) stepped->start(chunk, inside.own_slice(chunk), partial(chunk));
      if (direct) direct->send_parts(chunk, inside.own_slice(chunk), partial(chunk));
    }
    if (uses_slots && step >= lag) {
      communicator.publish(Stage::kCopiedOut, inside.input_number(step - lag) + 1);
    }
    for (std::size_t turn = 0; stepped && turn < plan.exchange_steps; ++turn) {
      for (std::uint64_t chunk = stepped->oldest(); chunk < stepped->end(); ++chunk) {
        co_await stepped->arrived(chunk);
        stepped->advance(chunk);
      }
    }
    lag += plan.parts_ahead;
    if (direct && exists(step, lag)) {
      co_await direct->parts_received(step - lag);
      direct->combine(step - lag);
    }
    lag += plan.results_ahead;
    if (exists(step, lag)) {
      const std::uint64_t chunk = step - lag;
      if (direct && (uses_slots || uses_claims)) co_await direct->results_received(chunk);
      if (uses_claims && inside.has_lane()) inside.store(chunk);
      if (uses_slots) {
        co_await slot_is_free(communicator, inside.result_number(step));
        inside.hand_on(chunk, inside.result_number(step));
      }
    }
    lag += plan.slot_lag;
    if (uses_slots && exists(step, lag)) {
      const std::uint64_t number = inside.result_number(step - plan.slot_lag);
      co_await communicator.reached(context.team, Stage::kReduced, number + 1);
      inside.copy_out(step - lag, number);
    }
    if (uses_slots && step >= plan.slot_lag) {
      communicator.publish(Stage::kCopiedOut, inside.result_number(step - plan.slot_lag) + 1);
    }
  }
  if (uses_slots) publish_all(communicator);
  for (std::uint64_t chunk = plan.chunks - window; chunk < plan.chunks; ++chunk) {
    if (stepped) co_await stepped->sent(chunk);
    if (!direct) continue;
    co_await direct->parts_sent(chunk);
    co_await direct->results_received(chunk);
    co_await direct->results_sent(chunk);
  }
  if (uses_claims) co_await wait_for_local_peers(context);
}

}  // namespace sparkhvd
