// The ranks of one process set and the way to each: a connection per peer and, inside a host,
// shared memory.
//
// **Threads.** Used by one thread at a time, the one that drives the engine.
//
// **Ownership.** Every rank writes its own region and reads the others', which are mapped
// read-only.
//
// **Shutdown.** Mappings outlive the peers' processes; links end as transport/link.h says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "message.h"
#include "task.h"
#include "transport/bell.h"
#include "transport/link.h"
#include "transport/memfd.h"
#include "types.h"

namespace sparkhvd {

/// How far a rank is with the chunks that pass through shared memory: a count of chunks since the
/// start.
enum class Stage : std::uint8_t {
  kCopiedIn,   // its part of the chunk is in its slot
  kReduced,    // its slice of the result is in its slot
  kCopiedOut,  // it has read all that it needs from the others' slots
};
inline constexpr std::size_t kNumStages = 3;

struct CommunicatorOptions {
  Rank rank{};
  std::vector<std::int32_t> hosts;  // by rank
  std::uint64_t slot_bytes = 0;
  std::uint32_t slots = 0;
  bool use_shared_memory = true;
  double connect_timeout_s = 0;
};

class Communicator {
 public:
  /// Exchanges what the ranks must know of each other and maps the memory of this host's ranks.
  /// Collective. `warnings` receives what the user should read.
  Communicator(CommunicatorOptions options, std::vector<Fd> sockets, Bell& bell,
               std::vector<std::string>& warnings);

  Rank rank() const noexcept { return options_.rank; }
  std::size_t size() const noexcept { return options_.hosts.size(); }
  Link& link(Rank peer) { return links_[static_cast<std::size_t>(index_of(peer))]; }
  std::span<Link> links() noexcept { return links_; }

  /// Ranks that share memory, in rank order; a rank that shares with nobody is alone in its island.
  /// Islands are in the order of their first rank.
  const std::vector<std::vector<Rank>>& islands() const noexcept { return islands_; }
  std::size_t island_index() const noexcept { return island_; }
  const std::vector<Rank>& island() const noexcept { return islands_[island_]; }
  std::size_t local_index() const noexcept { return local_; }
  std::size_t local_size() const noexcept { return island().size(); }
  /// The smallest island: that many ranks of each exchange with their like on the others.
  std::size_t num_lanes() const noexcept { return num_lanes_; }

  // Shared memory of the island; only if it has more than one rank.
  std::size_t slot_bytes() const noexcept { return options_.slot_bytes; }
  std::uint64_t num_slots() const noexcept { return options_.slots; }
  std::byte* own_slot(std::uint64_t chunk) const noexcept;
  const std::byte* slot(std::size_t local, std::uint64_t chunk) const noexcept;
  /// Number of the next chunk; equal on all ranks of the island between operations.
  std::uint64_t next_chunk() const noexcept { return next_chunk_; }
  void advance_chunks(std::uint64_t count) noexcept { next_chunk_ += count; }
  /// Tells the island that this rank has done `stage` for all chunks before `count`.
  void publish(Stage stage, std::uint64_t count) noexcept;

  /// Every rank of the island has done `stage` for all chunks before `count`.
  class Reached final : public Condition {
   public:
    Reached(const Communicator& communicator, Stage stage, std::uint64_t count)
        : communicator_(&communicator), stage_(stage), count_(count) {}
    bool ready() const override;
    std::vector<Rank> awaited() const override;

   private:
    const Communicator* communicator_;
    Stage stage_;
    std::uint64_t count_;
  };
  Reached reached(Stage stage, std::uint64_t count) const { return {*this, stage, count}; }

  /// In a forked child: closes the descriptors without a word to the peers.
  void close_descriptors() noexcept;

 private:
  struct Region {
    Mapping mapping;
    SharedWord* stages = nullptr;  // [kNumStages]
    std::byte* slots = nullptr;
  };

  std::size_t region_bytes() const noexcept;
  std::vector<Rank> host_mates() const;
  std::optional<Fd> create_region(std::vector<std::string>& warnings);
  Hello own_hello() const;
  void check_hello(Rank peer, const Hello& hello) const;
  void exchange(Bell& bell, std::vector<std::string>& warnings);
  bool map_mates(Bell& bell, std::vector<std::string>& warnings);
  template <class Handle>
  void receive_one(FrameType type, TimePoint deadline, Handle handle);
  void form_islands(const std::vector<bool>& mapped);
  Region make_region(const Fd& memory, Mapping::Access access) const;

  CommunicatorOptions options_;
  Bell* bell_;
  std::vector<Link> links_;
  std::vector<std::vector<Rank>> islands_;
  std::size_t island_ = 0;
  std::size_t local_ = 0;
  std::size_t num_lanes_ = 1;
  std::vector<Region> regions_;  // by local index
  std::optional<Region> own_region_;
  std::vector<Fd> mate_memory_;  // by rank, until mapped
  std::vector<Fd> mate_event_;
  std::uint64_t next_chunk_ = 0;
};

/// Sends and receives of one step of a collective.
class Transfers {
 public:
  Transfers(Communicator& communicator, std::int32_t stream)
      : communicator_(&communicator), stream_(stream) {}

  void send(Rank to, std::span<const std::byte> payload);
  void receive(Rank from, std::span<std::byte> target);

  /// Everything sent / received so far through this object is done.
  class Done final : public Condition {
   public:
    struct Entry {
      Rank peer;
      Link::Ticket ticket;
    };
    Done(Communicator& communicator, const std::vector<Entry>& entries, bool is_send)
        : communicator_(&communicator), entries_(&entries), is_send_(is_send) {}
    bool ready() const override;
    std::vector<Rank> awaited() const override;

   private:
    bool is_done(const Entry& entry) const;
    Communicator* communicator_;
    const std::vector<Entry>* entries_;
    bool is_send_;
  };
  Done all_sent() const { return {*communicator_, sends_, true}; }
  Done all_received() const { return {*communicator_, receives_, false}; }

 private:
  Communicator* communicator_;
  std::int32_t stream_;
  std::vector<Done::Entry> sends_;
  std::vector<Done::Entry> receives_;
};

}  // namespace sparkhvd
