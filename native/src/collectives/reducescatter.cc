// Reducescatter of tensors along the first dimension. If it is not divisible by the number of ranks, the first ranks
// get an additional row. Inside an island every rank adds up its own slice from its tensor and the slots of the other
// ranks. With several islands, each rank also serves some ranks of the other islands: inside its island it adds up
// their slices too, and sends them these partial results. It adds up the partial results that it receives in the order
// of the islands. The slices that a rank adds up are its *charge*.
#include <algorithm>
#include <memory>

#include "collectives/collectives.h"
#include "collectives/spec.h"
#include "nccl/calls.h"

namespace sparkhvd {
namespace {

// Received bytes are added up in segments of this size, so that adding overlaps with receiving.
constexpr std::size_t kSegmentBytes = 1 << 20;

class Reducescatter {
 public:
  /// `descriptor`: has the shapes that are divided. `results`: memory for this rank's rows. Both must outlive this
  /// object.
  Reducescatter(Context& context, const Descriptor& descriptor, const Pieces& results)
      : context_(context),
        communicator_(context.communicator),
        team_(context.team),
        descriptor_(descriptor),
        pieces_(context.operation.pieces),
        results_(results),
        dtype_(descriptor.dtype),
        element_(element_size(dtype_)),
        is_raw_(team_.is_all_alone()),
        unit_(is_raw_ ? element_ : element_size(accumulation_type(dtype_))),
        own_(rows_of(descriptor, team_.size(), team_.index())) {
    for (std::size_t local = 0; local < team_.local_size(); ++local) {
      charges_.push_back(charge_of(local));
    }
    for (const auto& charge : charges_) longest_ = std::max(longest_, charge.bytes.size());
    // A slot is cut into one lane per rank of the island.
    const std::size_t lane = communicator_.knobs().chunk_bytes / team_.local_size();
    lane_bytes_ = lane >= 64 ? lane / 64 * 64 : std::max(lane / element_ * element_, element_);
    sources_.resize(std::max(team_.local_size(), team_.islands().size()));
  }

  std::size_t own_bytes() const noexcept { return own_.size(); }

  /// The passage of every rank's input for the charges of the other ranks through its slot. `reduce_chunk` adds up a
  /// chunk of this rank's charge.
  template <class Reduce>
  Passage passage(Reduce reduce_chunk) {
    Passage passage;
    passage.chunks = (longest_ + lane_bytes_ - 1) / lane_bytes_;
    passage.fill = [this](std::uint64_t chunk, std::byte* slot) {
      for (std::size_t local = 0; local < charges_.size(); ++local) {
        if (local == team_.local_index()) continue;
        std::byte* lane = slot + local * lane_bytes_;
        charges_[local].bytes.for_range(
            chunk * lane_bytes_, lane_bytes_,
            [&](std::size_t place, std::size_t offset, std::size_t bytes) {
              pieces_.read(place, {lane + offset, bytes});
            });
      }
    };
    passage.take = [this, reduce_chunk](std::uint64_t chunk, std::uint64_t number) {
      reduce_chunk(chunk * lane_bytes_, number);
    };
    return passage;
  }

  /// With one island: adds up the part of this rank's slice from `begin` on that is in the slots.
  void reduce_result(std::size_t begin, std::uint64_t number) {
    for_own(begin, lane_bytes_,
            [&](const std::byte* input, std::byte* output, std::size_t at, std::size_t bytes) {
              set_sources(input, number, at - begin);
              context_.kernels.reduce(dtype_, kernel_op(context_), output,
                                      std::span(sources_).first(team_.local_size()),
                                      bytes / element_, scaling_of(context_));
            });
  }

  /// With one rank: applies only the factors.
  void reduce_lone() {
    for (std::size_t begin = 0; begin < own_.size(); begin += lane_bytes_) reduce_result(begin, 0);
  }

  /// With several islands: adds up a part of the charge, and sends the parts that are complete.
  void reduce_partial(std::size_t begin, std::uint64_t number) {
    const Charge& charge = charges_[team_.local_index()];
    std::size_t end = begin;
    charge.bytes.for_range(
        begin, lane_bytes_, [&](std::size_t place, std::size_t offset, std::size_t bytes) {
          pieces_.for_range(place, bytes, [&](const Pieces::Part& part) {
            set_sources(part.input, number, offset + part.offset);
            end = begin + offset + part.offset;
            context_.kernels.reduce_partial(dtype_, kernel_op(context_),
                                            partials_.get() + end / element_ * unit_,
                                            std::span(sources_).first(team_.local_size()),
                                            part.bytes / element_, scaling_of(context_));
            end += part.bytes;
          });
        });
    send_before(end);
  }

  /// Posts the receives from the other islands.
  void start(Transfers& sends) {
    sends_ = &sends;
    const auto& islands = team_.islands();
    const std::size_t bytes = own_.size() / element_ * unit_;
    incoming_ = std::make_unique_for_overwrite<std::byte[]>(islands.size() * bytes);
    segments_ = (bytes + kSegmentBytes - 1) / kSegmentBytes;
    arrivals_.assign(segments_, Transfers(communicator_));
    for (std::size_t segment = 0; segment < segments_; ++segment) {
      const std::size_t begin = segment * kSegmentBytes;
      const std::size_t size = std::min(kSegmentBytes, bytes - begin);
      for (std::size_t i = 0; i < islands.size(); ++i) {
        if (i == team_.island_index()) continue;
        const Rank giver = islands[i][team_.local_index() % islands[i].size()];
        arrivals_[segment].receive(giver, {incoming_.get() + i * bytes + begin, size});
      }
    }
    const Charge& charge = charges_[team_.local_index()];
    if (team_.local_size() > 1 || !is_raw_) {
      partials_ =
          std::make_unique_for_overwrite<std::byte[]>(charge.bytes.size() / element_ * unit_);
    }
    if (team_.local_size() > 1) return;
    if (partials_) {
      for (std::size_t begin = 0; begin < charge.bytes.size(); begin += lane_bytes_) {
        reduce_partial(begin, 0);
      }
      return;
    }
    for (const auto& [to, range] : charge.others) {
      charge.bytes.for_range(range.begin, range.size,
                             [&](std::size_t place, std::size_t, std::size_t size) {
                               pieces_.for_range(place, size, [&](const Pieces::Part& part) {
                                 sends.send(to, {part.input, part.bytes});
                               });
                             });
    }
  }

  std::size_t segments() const noexcept { return segments_; }
  Transfers::Done arrived(std::size_t segment) const { return arrivals_[segment].all_received(); }

  void finish(std::size_t segment) {
    const std::size_t bytes = own_.size() / element_ * unit_;
    const std::size_t own_begin = charges_[team_.local_index()].bytes.size() - own_.size();
    for_own(segment * kSegmentBytes / unit_ * element_, kSegmentBytes / unit_ * element_,
            [&](const std::byte* input, std::byte* output, std::size_t at, std::size_t size) {
              const std::size_t islands = team_.islands().size();
              for (std::size_t i = 0; i < islands; ++i) {
                sources_[i] = incoming_.get() + i * bytes + at / element_ * unit_;
              }
              sources_[team_.island_index()] =
                  partials_ ? partials_.get() + (own_begin + at) / element_ * unit_ : input;
              const auto sources = std::span(sources_).first(islands);
              const ReduceOp op = kernel_op(context_);
              if (is_raw_) {
                context_.kernels.reduce(dtype_, op, output, sources, size / element_,
                                        scaling_of(context_));
              } else {
                context_.kernels.finish(dtype_, op, output, sources, size / element_,
                                        scaling_of(context_));
              }
            });
  }

 private:
  /// The slices that a rank of this island adds up: slices of ranks of other islands, then its own slice.
  struct Charge {
    struct Other {
      Rank to;
      Range range;  // range of `bytes`
    };
    RangeList bytes;
    std::vector<Other> others;
  };

  Charge charge_of(std::size_t local) const {
    Charge charge;
    const auto add = [&](Rank rank) {
      const RangeList slice = rows_of(descriptor_, team_.size(), team_.index_in(rank));
      slice.for_range(0, slice.size(), [&](std::size_t place, std::size_t, std::size_t size) {
        charge.bytes.add({place, size});
      });
      return slice.size();
    };
    const auto& islands = team_.islands();
    for (std::size_t i = 0; i < islands.size(); ++i) {
      if (i == team_.island_index()) continue;
      for (std::size_t l = local; l < islands[i].size(); l += team_.local_size()) {
        const std::size_t begin = charge.bytes.size();
        charge.others.push_back({islands[i][l], {begin, add(islands[i][l])}});
      }
    }
    add(team_.island()[local]);
    return charge;
  }

  /// Sets the sources of a reduction: this rank's input, and the same bytes in the slots of its island peers, at
  /// `offset` in its lane.
  void set_sources(const std::byte* input, std::uint64_t number, std::size_t offset) {
    const std::size_t me = team_.local_index();
    for (std::size_t local = 0; local < team_.local_size(); ++local) {
      sources_[local] = local == me ? input
                                    : communicator_.slot(team_.island()[local], number) +
                                          me * lane_bytes_ + offset;
    }
  }

  void send_before(std::size_t end) {
    const Charge& charge = charges_[team_.local_index()];
    for (; sent_ < charge.others.size(); ++sent_) {
      const auto& [to, range] = charge.others[sent_];
      if (range.begin + range.size > end) return;
      sends_->send(
          to, {partials_.get() + range.begin / element_ * unit_, range.size / element_ * unit_});
    }
  }

  /// Calls `use(input, output, offset in the slice, bytes)` for the parts of a range of this rank's slice.
  template <class Use>
  void for_own(std::size_t begin, std::size_t size, Use use) const {
    own_.for_range(begin, size, [&](std::size_t place, std::size_t offset, std::size_t bytes) {
      pieces_.for_range(place, bytes, [&](const Pieces::Part& in) {
        const std::size_t at = begin + offset + in.offset;
        results_.for_range(at, in.bytes, [&](const Pieces::Part& out) {
          use(in.input + out.offset, out.output, at + out.offset, out.bytes);
        });
      });
    });
  }

  Context& context_;
  Communicator& communicator_;
  const Team& team_;
  const Descriptor& descriptor_;
  const Pieces& pieces_;
  const Pieces& results_;
  DType dtype_;
  std::size_t element_;
  bool is_raw_;
  std::size_t unit_;  // bytes of an element that is sent between islands
  RangeList own_;
  std::vector<Charge> charges_;  // by local index
  std::size_t longest_ = 0;
  std::size_t lane_bytes_ = 0;
  std::vector<const void*> sources_;
  // Between islands:
  std::unique_ptr<std::byte[]> partials_;  // partial results of the charge
  std::unique_ptr<std::byte[]> incoming_;  // [island][own slice]
  std::size_t segments_ = 0;
  std::vector<Transfers> arrivals_;  // by segment
  Transfers* sends_ = nullptr;
  std::size_t sent_ = 0;
};

}  // namespace

Task divide_and_reduce(Context& context, const Descriptor& descriptor, const Pieces& results) {
  Reducescatter work(context, descriptor, results);
  if (context.team.is_one_island()) {
    if (context.team.size() == 1) work.reduce_lone();
    co_await pass_through_slots(context,
                                work.passage([&work](std::size_t begin, std::uint64_t number) {
                                  work.reduce_result(begin, number);
                                }));
    co_return;
  }
  Transfers sends(context.communicator);
  work.start(sends);
  co_await pass_through_slots(context,
                              work.passage([&work](std::size_t begin, std::uint64_t number) {
                                work.reduce_partial(begin, number);
                              }));
  for (std::size_t segment = 0; segment < work.segments(); ++segment) {
    co_await work.arrived(segment);
    work.finish(segment);
  }
  co_await sends.all_sent();
}

Task reducescatter(Context& context) {
  context.algorithm = "reducescatter";
  const Operation& operation = context.operation;
  if (operation.pieces.bytes() == 0) co_return;
  co_await divide_and_reduce(context, operation.descriptor, operation.results);
}

namespace {

void enqueue_reducescatter(const nccl::Calls& calls, std::size_t tensor) {
  const nccl::Rows rows = calls.divided_rows(tensor);
  const std::byte* input = calls.input(tensor);
  if (rows.is_even()) {
    return calls.reduce_scatter(input, calls.output(tensor), rows.counts[0] * rows.row_elements);
  }
  for (std::size_t member = 0; member < calls.members(); ++member) {
    calls.reduce(input + rows.offset(member),
                 member == calls.index() ? calls.output(tensor) : nullptr,
                 rows.counts[member] * rows.row_elements, member);
  }
}

}  // namespace

extern const CollectiveSpec kReducescatterSpec = {.collective = Collective::kReducescatter,
                                                  .min_tensors = 1,
                                                  .max_tensors = UINT32_MAX,
                                                  .reduces = true,
                                                  .result = Result::kOwnRows,
                                                  .divides_rows = true,
                                                  .check = take_digest,
                                                  .run = reducescatter,
                                                  .device_algorithm = "nccl_reducescatter",
                                                  .enqueue = enqueue_reducescatter};

}  // namespace sparkhvd
