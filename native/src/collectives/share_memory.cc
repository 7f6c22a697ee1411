// Allocates new memory that the ranks of an island map from each other, for tensors that are reduced in place.
#include <algorithm>
#include <optional>

#include "collectives/answers.h"
#include "collectives/collectives.h"
#include "error.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::vector<Rank> others(std::span<const Rank> ranks, Rank self) {
  std::vector<Rank> result(ranks.begin(), ranks.end());
  std::erase(result, self);
  return result;
}

class SharedMemory {
 public:
  SharedMemory(Context& context, std::size_t bytes, Segment::Kind kind)
      : context_(context), world_(context.communicator.world()), team_(context.team) {
    const SegmentKey key{context.communicator.process_set(), context.agreed.sequence};
    context.segment = std::make_shared<Segment>(key, bytes, kind);
  }
  const SegmentKey& key() const noexcept { return context_.segment->key(); }

  std::optional<Fd> create() {
    const std::size_t bytes = context_.segment->bytes();
    try {
      const std::size_t pieces = context_.segment->is_one_piece() ? 1 : team_.local_size();
      if (auto shortage = memory_shortage(bytes, bytes * pieces)) {
        warn(*shortage);
        return std::nullopt;
      }
      Fd memory = create_memfd(bytes);
      context_.segment->add(team_.self(), Mapping(memory, bytes, Mapping::Access::kReadWrite));
      return memory;
    } catch (const Error& error) {
      warn(error.what());
      return std::nullopt;
    }
  }

  void offer(const std::optional<Fd>& memory, std::span<const Rank> local_peers) {
    const Bytes frame = encode(SegmentOffer{key(), memory.has_value()});
    for (const Rank local_peer : local_peers) {
      if (memory) {
        const int fds[] = {memory->get()};
        world_.link(local_peer).send_with_fds(frame, fds);
      } else {
        world_.link(local_peer).send(frame);
      }
    }
  }

  /// Maps the memory of all local peers. False if this fails.
  bool map(std::span<const Rank> local_peers) {
    const std::size_t bytes = context_.segment->bytes();
    for (const Rank local_peer : local_peers) {
      auto offer = world_.take_offer(key(), local_peer);
      // A local peer without memory warns with the reason itself.
      if (!offer || !offer->has_memory) return false;
      try {
        check_memfd(offer->memory, bytes);
        context_.segment->add(local_peer,
                              Mapping(offer->memory, bytes, Mapping::Access::kReadWrite));
      } catch (const Error& error) {
        warn("the memory of " + rank_text(local_peer) + " cannot be mapped (" + error.what() + ")");
        return false;
      }
    }
    return true;
  }

 private:
  void warn(const std::string& reason) {
    context_.warnings.push_back(
        rank_text(team_.self()) + ": " + std::to_string(context_.segment->bytes()) +
        " bytes of memory cannot be shared with the ranks of this host, "
        "because " +
        without_stop(reason) + ". Tensors in it are copied, which is slower.");
  }

  Context& context_;
  World& world_;
  const Team& team_;
};

/// Divides an island with a rank that lacks a piece: its ranks become islands of one rank.
void divide_islands(Context& context, const std::vector<Rank>& lacking) {
  const Team& team = context.team;
  const auto is_shared = [&](const std::vector<Rank>& island) {
    return std::ranges::none_of(island,
                                [&](Rank rank) { return std::ranges::count(lacking, rank) > 0; });
  };
  std::vector<std::vector<Rank>> islands;
  for (const auto& island : team.islands()) {
    if (is_shared(island)) {
      islands.push_back(island);
    } else {
      for (const Rank rank : island) islands.push_back({rank});
    }
  }
  if (!is_shared(team.island())) context.segment->keep_only(team.self());
  context.team = Team(team.self(), std::move(islands));
}

}  // namespace

Task share_memory(Context& context, std::size_t bytes, Segment::Kind kind) {
  context.algorithm = "share_memory";
  World& world = context.communicator.world();
  const Team& team = context.team;
  SharedMemory work(context, bytes, kind);
  const SegmentKey key = work.key();
  const bool is_one_piece = kind == Segment::Kind::kOnePiece;
  const bool brings = !is_one_piece || team.local_index() == 0;
  // First all other ranks of the island; below, the owners of the memory that this rank maps.
  auto local_peers = others(team.island(), team.self());
  const auto takers = brings ? local_peers : std::vector<Rank>{};
  if (is_one_piece) {
    local_peers = brings ? std::vector<Rank>{} : std::vector<Rank>{team.island().front()};
  }
  Answers answers(context, key);
  {
    const auto memory = brings ? work.create() : std::nullopt;
    work.offer(memory, takers);
    const auto has_offer = [&](Rank rank) { return world.offer(key, rank) != nullptr; };
    co_await Arrived(has_offer, std::span<const Rank>(local_peers));
    answers.give(work.map(local_peers) && (memory.has_value() || !brings));
  }
  co_await answers.all();
  const auto lacking = answers.take_refusals();
  if (!is_one_piece) {
    divide_islands(context, lacking);
  } else if (!lacking.empty()) {
    context.segment = nullptr;
  }
}

}  // namespace sparkhvd
