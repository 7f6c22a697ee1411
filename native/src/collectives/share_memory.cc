// New memory that the ranks of each island map from each other, for tensors that are reduced where
// they lie.
#include <algorithm>
#include <optional>

#include "collectives/collectives.h"
#include "error.h"
#include "text.h"

namespace sparkhvd {
namespace {

/// All of the ranks have sent something about the new memory.
template <class Has>
class Arrived final : public Condition {
 public:
  Arrived(Has has, std::span<const Rank> ranks) : has_(has), ranks_(ranks) {}
  bool ready() const override { return std::ranges::all_of(ranks_, has_); }
  std::vector<Rank> awaited() const override {
    std::vector<Rank> ranks;
    std::ranges::copy_if(ranks_, std::back_inserter(ranks), [this](Rank r) { return !has_(r); });
    return ranks;
  }

 private:
  Has has_;
  std::span<const Rank> ranks_;
};

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

  /// True if the memory of all local peers is mapped.
  bool map(std::span<const Rank> local_peers) {
    const std::size_t bytes = context_.segment->bytes();
    for (const Rank local_peer : local_peers) {
      auto offer = world_.take_offer(key(), local_peer);
      // A local_peer without memory says why itself.
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

  void announce(bool ok, std::span<const Rank> peers) {
    for (const Rank peer : peers) world_.link(peer).send(encode(SegmentMapped{key(), ok}));
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

}  // namespace

Task share_memory(Context& context, std::size_t bytes, Segment::Kind kind) {
  context.algorithm = "share_memory";
  World& world = context.communicator.world();
  const Team& team = context.team;
  SharedMemory work(context, bytes, kind);
  const SegmentKey key = work.key();
  const bool is_one_piece = kind == Segment::Kind::kOnePiece;
  const bool brings = !is_one_piece || team.local_index() == 0;
  // Whose memory this rank maps.
  auto local_peers = others(team.island(), team.self());
  const auto takers = brings ? local_peers : std::vector<Rank>{};
  if (is_one_piece) {
    local_peers = brings ? std::vector<Rank>{} : std::vector<Rank>{team.island().front()};
  }
  const auto peers = others(team.ranks(), team.self());
  bool ok = false;
  {
    const auto memory = brings ? work.create() : std::nullopt;
    work.offer(memory, takers);
    const auto has_offer = [&](Rank rank) { return world.offer(key, rank) != nullptr; };
    co_await Arrived(has_offer, local_peers);
    ok = work.map(local_peers) && (memory.has_value() || !brings);
  }
  work.announce(ok, peers);
  const auto has_answer = [&](Rank rank) { return world.mapped(key, rank).has_value(); };
  co_await Arrived(has_answer, peers);
  const auto is_mapped = [&](Rank rank) {
    return rank == team.self() ? ok : world.mapped(key, rank).value();
  };
  if (is_one_piece) {
    if (!std::ranges::all_of(team.ranks(), is_mapped)) context.segment = nullptr;
    world.forget(key);
    co_return;
  }
  std::vector<std::vector<Rank>> islands;
  for (const auto& island : team.islands()) {
    if (std::ranges::all_of(island, is_mapped)) {
      islands.push_back(island);
    } else {
      for (const Rank rank : island) islands.push_back({rank});
    }
  }
  if (!std::ranges::all_of(team.island(), is_mapped)) context.segment->keep_only(team.self());
  world.forget(key);
  context.team = Team(team.self(), std::move(islands));
}

}  // namespace sparkhvd
