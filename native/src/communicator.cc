#include "communicator.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <new>

#include "error.h"
#include "message.h"
#include "text.h"

namespace sparkhvd {
namespace {

// The words of a region have its first page to themselves.
constexpr std::size_t kWordsBytes = 4096;
constexpr std::size_t kSleepWord = kNumStages;
static_assert((kNumStages + 1) * sizeof(SharedWord) <= kWordsBytes);

bool is_unix_socket(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.ss_family == AF_UNIX;
}

}  // namespace

Communicator::Communicator(CommunicatorOptions options, std::vector<Fd> sockets, Bell& bell,
                           std::vector<std::string>& warnings)
    : options_(std::move(options)), bell_(&bell) {
  // A whole number of pages, so that slots never share a cache line.
  options_.slot_bytes = (options_.slot_bytes + 4095) / 4096 * 4096;
  links_.resize(size());
  for (std::size_t i = 0; i < size(); ++i) {
    links_[i] = Link(Rank{static_cast<std::int32_t>(i)}, std::move(sockets[i]));
  }
  mate_memory_.resize(size());
  mate_event_.resize(size());
  exchange(bell, warnings);
}

std::size_t Communicator::region_bytes() const noexcept {
  return kWordsBytes + options_.slot_bytes * options_.slots;
}

std::vector<Rank> Communicator::host_mates() const {
  const auto me = static_cast<std::size_t>(index_of(options_.rank));
  std::vector<Rank> mates;
  for (std::size_t i = 0; i < size(); ++i) {
    if (i != me && options_.hosts[i] == options_.hosts[me]) {
      mates.push_back(Rank{static_cast<std::int32_t>(i)});
    }
  }
  return mates;
}

Communicator::Region Communicator::make_region(const Fd& memory, Mapping::Access access) const {
  Region region;
  region.mapping = Mapping(memory, region_bytes(), access);
  region.stages = reinterpret_cast<SharedWord*>(region.mapping.data());
  region.slots = region.mapping.data() + kWordsBytes;
  return region;
}

std::optional<Fd> Communicator::create_region(std::vector<std::string>& warnings) {
  const auto mates = host_mates();
  if (!options_.use_shared_memory || mates.empty()) return std::nullopt;
  const std::string prefix =
      rank_text(options_.rank) + ": no shared memory with the ranks of this host, because ";
  const std::string suffix = ". Their tensors go through sockets, which is slower.";
  for (const Rank mate : mates) {
    if (!is_unix_socket(link(mate).fd())) {
      warnings.push_back(prefix + "the connection to " + rank_text(mate) +
                         " cannot carry descriptors" + suffix);
      return std::nullopt;
    }
  }
  if (auto shortage = memory_shortage(region_bytes(), region_bytes() * (mates.size() + 1))) {
    warnings.push_back(prefix + *shortage + suffix);
    return std::nullopt;
  }
  try {
    Fd memory = create_memfd(region_bytes());
    own_region_ = make_region(memory, Mapping::Access::kReadWrite);
    // Fresh memory is zero, so constructing the words changes nothing that a peer could see.
    for (std::size_t i = 0; i <= kSleepWord; ++i) new (own_region_->stages + i) SharedWord;
    return memory;
  } catch (const Error& error) {
    own_region_.reset();
    warnings.push_back(prefix + error.what() + suffix);
    return std::nullopt;
  }
}

Hello Communicator::own_hello() const {
  Hello hello;
  hello.rank = index_of(options_.rank);
  hello.hosts = options_.hosts;
  hello.slot_bytes = options_.slot_bytes;
  hello.slots = options_.slots;
  hello.has_memory = own_region_.has_value();
  return hello;
}

void Communicator::check_hello(Rank peer, const Hello& hello) const {
  const Hello own = own_hello();
  const auto differ = [&](const std::string& what, const std::string& theirs,
                          const std::string& ours) {
    throw Error(SPARKHVD_MISMATCH, "ranks disagree on " + what + ". " + "Rank " +
                                       std::to_string(index_of(peer)) + " has " + theirs + ", " +
                                       rank_text(options_.rank) + " has " + ours +
                                       ". Start every rank with the same settings and version.");
  };
  const auto compare = [&](const char* what, std::uint64_t theirs, std::uint64_t ours) {
    if (theirs != ours) differ(what, std::to_string(theirs), std::to_string(ours));
  };
  compare("the wire version", hello.wire_version, own.wire_version);
  compare("the world size", hello.hosts.size(), own.hosts.size());
  compare("slot_bytes", hello.slot_bytes, own.slot_bytes);
  compare("slots", hello.slots, own.slots);
  if (hello.hosts != own.hosts) {
    throw Error(SPARKHVD_MISMATCH, rank_text(peer) + " and " + rank_text(options_.rank) +
                                       " disagree on which ranks share a host.");
  }
  if (hello.rank != index_of(peer)) {
    throw Error(SPARKHVD_MISMATCH, "the connection meant for " + rank_text(peer) +
                                       " leads to rank " + std::to_string(hello.rank) + ".");
  }
}

/// Waits until every peer has sent its frame of `type`, and stops reading behind it.
template <class Handle>
void Communicator::receive_one(FrameType type, TimePoint deadline, Handle handle) {
  std::vector<bool> arrived(size(), false);
  arrived[static_cast<std::size_t>(index_of(options_.rank))] = true;
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
                throw Error(SPARKHVD_PEER_LOST, "a frame out of turn while connecting");
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

void Communicator::exchange(Bell& bell, std::vector<std::string>& warnings) {
  const TimePoint deadline = deadline_after(Clock::now(), options_.connect_timeout_s);
  const auto memory = create_region(warnings);
  const auto mates = host_mates();
  const Bytes hello = encode(own_hello());
  for (auto& link : links_) {
    if (!link.is_open()) continue;
    if (memory && std::ranges::count(mates, link.peer()) > 0) {
      const int fds[] = {memory->get(), bell.fd()};
      link.send_with_fds(hello, fds);
    } else {
      link.send(hello);
    }
  }
  std::vector<bool> has_memory(size(), false);
  has_memory[static_cast<std::size_t>(index_of(options_.rank))] = memory.has_value();
  receive_one(FrameType::kHello, deadline, [&](Rank peer, std::span<const std::byte> body) {
    const auto message = decode<Hello>(body);
    check_hello(peer, message);
    const auto index = static_cast<std::size_t>(index_of(peer));
    auto fds = link(peer).take_fds();
    has_memory[index] = message.has_memory;
    if (message.has_memory && fds.size() == 2 && std::ranges::count(mates, peer) > 0) {
      mate_memory_[index] = std::move(fds[0]);
      mate_event_[index] = std::move(fds[1]);
    }
  });
  const bool ok = memory.has_value() && map_mates(bell, warnings);
  for (auto& link : links_) {
    link.refuse_fds();
    if (link.is_open()) link.send(encode(Mapped{ok}));
  }
  std::vector<bool> mapped(size(), false);
  mapped[static_cast<std::size_t>(index_of(options_.rank))] = ok;
  receive_one(FrameType::kMapped, deadline, [&](Rank peer, std::span<const std::byte> body) {
    mapped[static_cast<std::size_t>(index_of(peer))] = decode<Mapped>(body).ok;
  });
  form_islands(mapped);
}

bool Communicator::map_mates(Bell& bell, std::vector<std::string>& warnings) {
  auto host = host_mates();
  host.insert(std::ranges::lower_bound(host, options_.rank), options_.rank);
  std::vector<Region> regions;
  for (const Rank mate : host) {
    if (mate == options_.rank) {
      regions.push_back(std::move(*own_region_));
      continue;
    }
    Fd& memory = mate_memory_[static_cast<std::size_t>(index_of(mate))];
    try {
      // A mate without memory has printed why.
      if (!memory.valid()) return false;
      check_memfd(memory, region_bytes());
      regions.push_back(make_region(memory, Mapping::Access::kReadOnly));
      memory.reset();
    } catch (const Error& error) {
      warnings.push_back(rank_text(options_.rank) + ": the memory of " + rank_text(mate) +
                         " cannot be mapped (" + error.what() +
                         "). Tensors of this host go through sockets, which is slower.");
      return false;
    }
  }
  regions_ = std::move(regions);
  for (std::size_t i = 0; i < host.size(); ++i) {
    SharedWord& word = regions_[i].stages[kSleepWord];
    if (host[i] == options_.rank) {
      bell.use_word(word);
    } else {
      bell.add_peer(word, std::move(mate_event_[static_cast<std::size_t>(index_of(host[i]))]));
    }
  }
  return true;
}

void Communicator::form_islands(const std::vector<bool>& mapped) {
  for (std::size_t i = 0; i < size(); ++i) {
    const auto host = options_.hosts[i];
    bool shares = options_.use_shared_memory;
    for (std::size_t j = 0; j < size(); ++j) {
      if (options_.hosts[j] == host) shares = shares && mapped[j];
    }
    const auto rank = Rank{static_cast<std::int32_t>(i)};
    const auto place = std::ranges::find_if(islands_, [&](const std::vector<Rank>& island) {
      return shares && options_.hosts[static_cast<std::size_t>(index_of(island[0]))] == host;
    });
    if (place == islands_.end()) {
      islands_.push_back({rank});
    } else {
      place->push_back(rank);
    }
  }
  num_lanes_ = size();
  for (std::size_t i = 0; i < islands_.size(); ++i) {
    num_lanes_ = std::min(num_lanes_, islands_[i].size());
    const auto place = std::ranges::find(islands_[i], options_.rank);
    if (place == islands_[i].end()) continue;
    island_ = i;
    local_ = static_cast<std::size_t>(place - islands_[i].begin());
  }
  // The bell keeps pointing at the words of `regions_`, so these stay even if the island is not
  // used.
}

std::byte* Communicator::own_slot(std::uint64_t chunk) const noexcept {
  return regions_[local_].slots + (chunk % options_.slots) * options_.slot_bytes;
}

const std::byte* Communicator::slot(std::size_t local, std::uint64_t chunk) const noexcept {
  return regions_[local].slots + (chunk % options_.slots) * options_.slot_bytes;
}

void Communicator::publish(Stage stage, std::uint64_t count) noexcept {
  // seq_cst against the sleeping words: see transport/bell.h.
  regions_[local_].stages[static_cast<std::size_t>(stage)].value.store(count,
                                                                       std::memory_order_seq_cst);
  bell_->ring_peers();
}

bool Communicator::Reached::ready() const {
  for (const auto& region : communicator_->regions_) {
    const auto& word = region.stages[static_cast<std::size_t>(stage_)].value;
    if (word.load(std::memory_order_seq_cst) < count_) return false;
  }
  return true;
}

std::vector<Rank> Communicator::Reached::awaited() const {
  std::vector<Rank> ranks;
  for (std::size_t i = 0; i < communicator_->regions_.size(); ++i) {
    const auto& word = communicator_->regions_[i].stages[static_cast<std::size_t>(stage_)].value;
    if (word.load(std::memory_order_seq_cst) < count_) {
      ranks.push_back(communicator_->island()[i]);
    }
  }
  return ranks;
}

void Communicator::close_descriptors() noexcept {
  for (auto& link : links_) link.close();
}

void Transfers::send(Rank to, std::span<const std::byte> payload) {
  if (payload.empty()) return;
  sends_.push_back({to, communicator_->link(to).send_data(stream_, payload)});
}

void Transfers::receive(Rank from, std::span<std::byte> target) {
  if (target.empty()) return;
  receives_.push_back({from, communicator_->link(from).receive_data(stream_, target)});
}

bool Transfers::Done::is_done(const Entry& entry) const {
  const Link& link = communicator_->link(entry.peer);
  return is_send_ ? link.sent(entry.ticket) : link.received(entry.ticket);
}

bool Transfers::Done::ready() const {
  return std::ranges::all_of(*entries_, [this](const Entry& entry) { return is_done(entry); });
}

std::vector<Rank> Transfers::Done::awaited() const {
  std::vector<Rank> ranks;
  for (const auto& entry : *entries_) {
    if (!is_done(entry)) ranks.push_back(entry.peer);
  }
  return ranks;
}

}  // namespace sparkhvd
