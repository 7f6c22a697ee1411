// Adasum (arXiv:2006.02924): gradients are combined in pairs, then the results of the pairs, and so on, so the team's
// size must be a power of two. Each tensor is combined separately. In step k a rank and its partner, with an index that
// differs in bit k, exchange their whole vectors. Both combine them with the lower index first, so they get the same
// bits. Each rank sends log2(N) S bytes.
#include <cstring>
#include <memory>

#include "collectives/collectives.h"
#include "kernels/adasum.h"

namespace sparkhvd {
namespace {

class Adasum {
 public:
  explicit Adasum(const Context& context)
      : context_(context),
        pieces_(context.operation.pieces),
        dtype_(context.operation.descriptor.dtype),
        wide_(accumulation_type(dtype_)),
        bytes_(pieces_.bytes() / element_size(dtype_) * element_size(wide_)),
        mine_(std::make_unique_for_overwrite<std::byte[]>(bytes_)),
        theirs_(std::make_unique_for_overwrite<std::byte[]>(bytes_)) {}

  std::span<std::byte> mine() const noexcept { return {mine_.get(), bytes_}; }
  std::span<std::byte> theirs() const noexcept { return {theirs_.get(), bytes_}; }

  /// Copies this rank's tensors, scaled and converted to the accumulation type.
  void read() const {
    std::size_t begin = 0;
    pieces_.for_range(0, pieces_.bytes(), [&](const Pieces::Part& part) {
      const void* sources[] = {part.input};
      context_.kernels.reduce_partial(dtype_, ReduceOp::kSum, mine_.get() + begin, sources,
                                      part.bytes / element_size(dtype_), scaling_of(context_));
      begin += part.bytes / element_size(dtype_) * element_size(wide_);
    });
  }

  void write() const {
    std::size_t begin = 0;
    pieces_.for_range(0, pieces_.bytes(), [&](const Pieces::Part& part) {
      const void* sources[] = {mine_.get() + begin};
      context_.kernels.finish(dtype_, ReduceOp::kSum, part.output, sources,
                              part.bytes / element_size(dtype_), scaling_of(context_));
      begin += part.bytes / element_size(dtype_) * element_size(wide_);
    });
  }

  void combine(bool is_mine_first) const {
    if (wide_ == DType::kFloat64) {
      combine_as<double>(is_mine_first);
    } else {
      combine_as<float>(is_mine_first);
    }
  }

 private:
  template <class T>
  void combine_as(bool is_mine_first) const {
    std::size_t begin = 0;
    for (const auto& shape : context_.operation.descriptor.shapes) {
      const std::size_t count = *count_elements(shape, dtype_);
      const std::span<T> mine(reinterpret_cast<T*>(mine_.get()) + begin, count);
      const std::span<const T> theirs(reinterpret_cast<const T*>(theirs_.get()) + begin, count);
      const std::span<const T> first = is_mine_first ? std::span<const T>(mine) : theirs;
      const std::span<const T> second = is_mine_first ? theirs : std::span<const T>(mine);
      adasum_combine(mine, first, second, adasum_products(first, second));
      begin += count;
    }
  }

  const Context& context_;
  const Pieces& pieces_;
  DType dtype_;
  DType wide_;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> mine_;
  std::unique_ptr<std::byte[]> theirs_;
};

}  // namespace

Task adasum_allreduce(Context& context) {
  context.algorithm = "adasum";
  if (context.operation.pieces.bytes() == 0) co_return;
  const Communicator& communicator = context.communicator;
  const Team& team = context.team;
  const Adasum work(context);
  work.read();
  const std::size_t chunk_bytes = communicator.knobs().chunk_bytes;
  for (std::size_t bit = 1; bit < team.size(); bit *= 2) {
    const auto partner_of = [&](Rank rank) { return team.ranks()[team.index_in(rank) ^ bit]; };
    const auto is_mate = [&](Rank rank) { return std::ranges::count(team.island(), rank) > 0; };
    const Rank partner = partner_of(team.self());
    Transfers transfers(context.communicator);
    if (!is_mate(partner)) {
      transfers.send(partner, work.mine());
      transfers.receive(partner, work.theirs());
    }
    // A rank with a partner in another island takes part too, because all ranks of an island count chunks equally.
    Passage passage;
    if (std::ranges::any_of(team.island(), [&](Rank rank) { return is_mate(partner_of(rank)); })) {
      passage.chunks = (work.mine().size() + chunk_bytes - 1) / chunk_bytes;
    }
    const auto part = [&](std::span<std::byte> all, std::uint64_t chunk) {
      const std::size_t begin = chunk * chunk_bytes;
      return all.subspan(begin, std::min(chunk_bytes, all.size() - begin));
    };
    passage.fill = [&](std::uint64_t chunk, std::byte* slot) {
      const auto source = part(work.mine(), chunk);
      if (is_mate(partner)) std::memcpy(slot, source.data(), source.size());
    };
    passage.take = [&](std::uint64_t chunk, std::uint64_t number) {
      const auto target = part(work.theirs(), chunk);
      if (is_mate(partner)) {
        std::memcpy(target.data(), communicator.slot(partner, number), target.size());
      }
    };
    co_await pass_through_slots(context, std::move(passage));
    co_await transfers.all_received();
    co_await transfers.all_sent();
    work.combine((team.index() & bit) == 0);
  }
  work.write();
}

}  // namespace sparkhvd
