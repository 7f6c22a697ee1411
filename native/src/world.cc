#include "world.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>

#include "communicator.h"
#include "error.h"
#include "message.h"
#include "text.h"

namespace sparkhvd {
namespace {

/// First page of a rank's memory: what the other ranks of the host read about the rank.
struct Page {
  SharedWord asleep;
  alignas(64) LivenessWord life;
  CpuShare cpus;
};
constexpr std::size_t kPageBytes = World::kMemoryOffset;
static_assert(sizeof(Page) <= kPageBytes);

Page& page_of(std::byte* piece) { return *reinterpret_cast<Page*>(piece); }

template <class Map>
std::size_t count_of(const Map& map, Rank from, std::int32_t process_set) {
  return static_cast<std::size_t>(std::ranges::count_if(map, [&](const auto& entry) {
    return entry.first.second == from && entry.first.first.process_set == process_set;
  }));
}

}  // namespace

World::World(WorldOptions options, std::vector<Fd> sockets, WakeupEvent& wakeup,
             std::vector<std::string>& warnings)
    : options_(std::move(options)), wakeup_(&wakeup) {
  // Rounds up to whole pages, so that two slots never share a cache line.
  options_.slot_bytes = (options_.slot_bytes + 4095) / 4096 * 4096;
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    const Rank peer{static_cast<std::int32_t>(i % size())};
    if (i < size()) {
      links_.emplace_back(peer, std::move(sockets[i]));
    } else {
      data_links_.emplace_back(peer, std::move(sockets[i]), DataLink::unasked_among(size()));
    }
  }
  mate_memory_.resize(size());
  mate_event_.resize(size());
  exchange(warnings);
}

std::size_t World::memory_bytes() const noexcept {
  return kPageBytes + Communicator::memory_bytes(options_) +
         Lane::bytes_of_all(ranks_of_own_host());
}

std::vector<Rank> World::ranks_of_host() const {
  const auto me = static_cast<std::size_t>(index_of(options_.membership.self));
  std::vector<Rank> local_peers;
  for (std::size_t i = 0; i < size(); ++i) {
    if (i != me && options_.membership.hosts[i] == options_.membership.hosts[me]) {
      local_peers.push_back(Rank{static_cast<std::int32_t>(i)});
    }
  }
  return local_peers;
}

Lane* World::lane(Rank owner, Rank other) const {
  const auto host = options_.membership.hosts[static_cast<std::size_t>(index_of(owner))];
  const auto end = options_.membership.hosts.begin() + index_of(other);
  const auto index =
      static_cast<std::size_t>(std::count(options_.membership.hosts.begin(), end, host));
  std::byte* lanes = memory_->data(owner) + kPageBytes + Communicator::memory_bytes(options_);
  return reinterpret_cast<Lane*>(lanes + index * Lane::bytes(ranks_of_own_host()));
}

std::optional<Fd> World::create_memory(std::vector<std::string>& warnings) {
  const auto local_peers = ranks_of_host();
  if (!options_.use_shared_memory || local_peers.empty()) return std::nullopt;
  const std::string prefix = rank_text(options_.membership.self) +
                             ": no shared memory with the ranks of this host, because ";
  const std::string suffix = ". Their tensors go through sockets, which is slower.";
  for (const Rank local_peer : local_peers) {
    if (link(local_peer).is_tcp()) {
      warnings.push_back(prefix + "the connection to " + rank_text(local_peer) +
                         " cannot carry descriptors" + suffix);
      return std::nullopt;
    }
  }
  if (auto shortage = memory_shortage(memory_bytes(), memory_bytes() * (local_peers.size() + 1))) {
    warnings.push_back(prefix + *shortage + suffix);
    return std::nullopt;
  }
  try {
    Fd memory = create_memfd(memory_bytes());
    auto segment = std::make_shared<Segment>(SegmentKey{0, kWorldMemory}, memory_bytes(),
                                             Segment::Kind::kWorkspace);
    // Fresh memory is zero, the initial value of all words.
    segment->add(options_.membership.self,
                 Mapping(memory, memory_bytes(), Mapping::Access::kReadWrite));
    Page& page = page_of(segment->data(options_.membership.self));
    page.cpus = own_cpus_;
    page.life.open();
    memory_ = std::move(segment);
    return memory;
  } catch (const Error& error) {
    warnings.push_back(prefix + without_stop(error.what()) + suffix);
    return std::nullopt;
  }
}

Hello World::own_hello() const {
  Hello hello;
  hello.rank = index_of(options_.membership.self);
  hello.hosts = options_.membership.hosts;
  hello.slot_bytes = options_.slot_bytes;
  hello.slots = options_.slots;
  hello.streams = options_.streams;
  hello.has_memory = memory_ != nullptr;
  return hello;
}

void World::check_hello(Rank peer, const Hello& hello) const {
  const Hello own = own_hello();
  const auto differ = [&](const std::string& what, const std::string& theirs,
                          const std::string& ours) {
    throw Error(SPARKHVD_MISMATCH, "ranks disagree on " + what + ". " + "Rank " +
                                       std::to_string(index_of(peer)) + " has " + theirs + ", " +
                                       rank_text(options_.membership.self) + " has " + ours +
                                       ". Start every rank with the same settings and version.");
  };
  const auto compare = [&](const char* what, std::uint64_t theirs, std::uint64_t ours) {
    if (theirs != ours) differ(what, std::to_string(theirs), std::to_string(ours));
  };
  compare("the wire version", hello.wire_version, own.wire_version);
  compare("the world size", hello.hosts.size(), own.hosts.size());
  compare("slot_bytes", hello.slot_bytes, own.slot_bytes);
  compare("slots", hello.slots, own.slots);
  compare("streams", hello.streams, own.streams);
  if (hello.hosts != own.hosts) {
    throw Error(SPARKHVD_MISMATCH, rank_text(peer) + " and " + rank_text(options_.membership.self) +
                                       " disagree on which ranks share a host.");
  }
  if (hello.rank != index_of(peer)) {
    throw Error(SPARKHVD_MISMATCH, "the connection meant for " + rank_text(peer) +
                                       " leads to rank " + std::to_string(hello.rank) + ".");
  }
}

/// Waits until every peer has sent its frame of `type`, and reads no further frames.
template <class Handle>
void World::receive_one(FrameType type, TimePoint deadline, Handle handle) {
  std::vector<bool> arrived(size(), false);
  arrived[static_cast<std::size_t>(index_of(options_.membership.self))] = true;
  while (true) {
    std::vector<pollfd> polls;
    std::vector<Rank> missing;
    for (auto& link : links_) {
      const auto index = static_cast<std::size_t>(index_of(link.peer()));
      if (!link.is_open()) continue;
      link.flush();
      if (!arrived[index]) {
        link.read(
            [&](FrameType got, std::span<const std::byte> body) {
              if (got == FrameType::kAbort) {
                const auto abort = decode<Abort>(body);
                throw Error(abort.status, abort.message);
              }
              if (got != type) {
                throw Error(SPARKHVD_PEER_LOST, "an unexpected frame while connecting");
              }
              handle(link.peer(), body);
              arrived[index] = true;
              return false;
            },
            kMaxControlBytes);
        if (!arrived[index] && link.state() != Link::State::kOpen) {
          const std::string why =
              link.state() == Link::State::kEnded
                  ? "its connection closed while the engine was starting (its process ended)"
                  : link.trouble();
          throw Error(SPARKHVD_PEER_LOST, rank_text(link.peer()) + " is lost: " + why + ".");
        }
      }
      short events = link.wants_write() ? POLLOUT : short{0};
      if (!arrived[index]) {
        events = static_cast<short>(events | POLLIN);
        missing.push_back(link.peer());
      }
      if (events != 0) polls.push_back({link.fd(), events, 0});
    }
    if (polls.empty()) return;
    const auto now = Clock::now();
    if (now >= deadline) {
      throw Error(SPARKHVD_TIMEOUT, (missing.empty() ? std::string("a rank") : rank_list(missing)) +
                                        " did not start an engine within connect_timeout_s = " +
                                        std::to_string(options_.connect_timeout_s) + " s.");
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
    ::poll(polls.data(), polls.size(),
           static_cast<int>(std::min<std::int64_t>(deadline == kNever ? 60000 : left, 60000)));
  }
}

void World::exchange(std::vector<std::string>& warnings) {
  const TimePoint deadline = deadline_after(Clock::now(), options_.connect_timeout_s);
  const auto memory = create_memory(warnings);
  const auto local_peers = ranks_of_host();
  const Bytes hello = encode(own_hello());
  for (auto& link : links_) {
    if (!link.is_open()) continue;
    if (memory && std::ranges::count(local_peers, link.peer()) > 0) {
      const int fds[] = {memory->get(), wakeup_->fd()};
      link.send_with_fds(hello, fds);
    } else {
      link.send(hello);
    }
  }
  std::vector<bool> has_memory(size(), false);
  has_memory[static_cast<std::size_t>(index_of(options_.membership.self))] = memory.has_value();
  receive_one(FrameType::kHello, deadline, [&](Rank peer, std::span<const std::byte> body) {
    const auto message = decode<Hello>(body);
    check_hello(peer, message);
    const auto index = static_cast<std::size_t>(index_of(peer));
    auto fds = link(peer).take_fds(message.has_memory ? 2 : 0);
    has_memory[index] = message.has_memory;
    if (message.has_memory && fds.size() == 2 && std::ranges::count(local_peers, peer) > 0) {
      mate_memory_[index] = std::move(fds[0]);
      mate_event_[index] = std::move(fds[1]);
    }
  });
  const bool ok = memory.has_value() && map_local_peers(warnings);
  for (auto& link : links_) {
    // Between hosts there are no descriptors to send.
    if (std::ranges::count(local_peers, link.peer()) == 0) link.refuse_fds();
  }
  for (auto& link : links_) {
    if (link.is_open()) link.send(encode(Mapped{ok}));
  }
  std::vector<bool> mapped(size(), false);
  mapped[static_cast<std::size_t>(index_of(options_.membership.self))] = ok;
  receive_one(FrameType::kMapped, deadline, [&](Rank peer, std::span<const std::byte> body) {
    mapped[static_cast<std::size_t>(index_of(peer))] = decode<Mapped>(body).ok;
  });
  form_islands(mapped);
}

bool World::map_local_peers(std::vector<std::string>& warnings) {
  const auto local_peers = ranks_of_host();
  for (const Rank local_peer : local_peers) {
    Fd& memory = mate_memory_[static_cast<std::size_t>(index_of(local_peer))];
    try {
      // A local peer without memory prints the reason itself.
      if (!memory.valid()) return false;
      check_memfd(memory, memory_bytes());
      memory_->add(local_peer, Mapping(memory, memory_bytes(), Mapping::Access::kReadWrite));
      memory.reset();
    } catch (const Error& error) {
      warnings.push_back(rank_text(options_.membership.self) + ": the memory of " +
                         rank_text(local_peer) + " cannot be mapped (" + error.what() +
                         "). Tensors of this host go through sockets, which is slower.");
      return false;
    }
  }
  wakeup_->use_word(page_of(memory_->data(options_.membership.self)).asleep);
  for (const Rank local_peer : local_peers) {
    wakeup_->add_peer(local_peer, page_of(memory_->data(local_peer)).asleep,
                      std::move(mate_event_[static_cast<std::size_t>(index_of(local_peer))]));
  }
  return true;
}

void World::form_islands(const std::vector<bool>& mapped) {
  std::vector<std::vector<Rank>> islands;
  for (std::size_t i = 0; i < size(); ++i) {
    const auto host = options_.membership.hosts[i];
    bool shares = options_.use_shared_memory;
    for (std::size_t j = 0; j < size(); ++j) {
      if (options_.membership.hosts[j] == host) shares = shares && mapped[j];
    }
    const auto rank = Rank{static_cast<std::int32_t>(i)};
    const auto place = std::ranges::find_if(islands, [&](const std::vector<Rank>& island) {
      return shares &&
             options_.membership.hosts[static_cast<std::size_t>(index_of(island[0]))] == host;
    });
    if (place == islands.end()) {
      islands.push_back({rank});
    } else {
      place->push_back(rank);
    }
  }
  // `memory_` stays even if the island is not used, because the wakeup event may point into it.
  team_ = Team(options_.membership.self, std::move(islands));
}

std::vector<CpuShare> World::cpu_shares() const {
  std::vector<CpuShare> shares{own_cpus_};
  for (const Rank mate : ranks_of_host()) {
    shares.push_back(memory() ? page_of(memory_->data(mate)).cpus : own_cpus_);
  }
  return shares;
}

TimePoint World::moved_at() const {
  TimePoint latest{};
  for (const DataLink& link : data_links_) {
    latest = std::max({latest, link.written_at(), link.read_at()});
  }
  return latest;
}

World::Life World::hold_life() const {
  return Life(memory_ ? &page_of(memory_->data(options_.membership.self)).life : nullptr);
}

std::vector<Rank> World::ended_mates() const {
  std::vector<Rank> ended;
  if (!memory()) return ended;
  for (const Rank mate : team_.island()) {
    if (page_of(memory_->data(mate)).life.has_ended()) ended.push_back(mate);
  }
  return ended;
}

const World::Offer* World::offer(const SegmentKey& key, Rank from) const {
  const auto entry = offers_.find({key, from});
  return entry == offers_.end() ? nullptr : &entry->second;
}

std::optional<World::Offer> World::take_offer(const SegmentKey& key, Rank from) {
  auto node = offers_.extract({key, from});
  if (node.empty()) return std::nullopt;
  return std::move(node.mapped());
}

std::optional<bool> World::mapped(const SegmentKey& key, Rank from) const {
  const auto entry = mapped_.find({key, from});
  return entry == mapped_.end() ? std::nullopt : std::optional<bool>(entry->second);
}

std::size_t World::num_offers(Rank from, std::int32_t process_set) const {
  return count_of(offers_, from, process_set);
}

std::size_t World::num_mapped(Rank from, std::int32_t process_set) const {
  return count_of(mapped_, from, process_set);
}

void World::arrived(Rank from, const SegmentOffer& message) {
  Offer offer;
  auto fds = link(from).take_fds(message.has_memory ? 1 : 0);
  offer.has_memory = !fds.empty();
  if (offer.has_memory) offer.memory = std::move(fds[0]);
  offers_.insert_or_assign({message.key, from}, std::move(offer));
}

void World::arrived(Rank from, const SegmentMapped& message) {
  mapped_.insert_or_assign({message.key, from}, message.ok);
}

void World::forget(const SegmentKey& key) {
  std::erase_if(offers_, [&](const auto& entry) { return entry.first.first == key; });
  std::erase_if(mapped_, [&](const auto& entry) { return entry.first.first == key; });
}

void World::close_descriptors() noexcept {
  for (auto& link : links_) link.close();
  for (auto& link : data_links_) link.close();
}

}  // namespace sparkhvd
