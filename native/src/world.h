// The other ranks of the job: connections, and the memory of this host's ranks.
//
// **Threads.** Only the driver's thread uses it.
//
// **Shutdown.** transport/link.h describes the end of links. Mappings stay valid after the peers' processes end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "clock.h"
#include "cpus.h"
#include "membership.h"
#include "message.h"
#include "point_to_point/lane.h"
#include "segment.h"
#include "spare_memory.h"
#include "team.h"
#include "transport/control_link.h"
#include "transport/data_link.h"
#include "transport/liveness_word.h"
#include "transport/memfd.h"
#include "transport/wakeup_event.h"
#include "types.h"

namespace sparkhvd {

struct WorldOptions {
  Membership membership;
  std::uint64_t slot_bytes = 0;
  std::uint32_t slots = 0;
  std::uint32_t streams = 1;  // connections for tensors per pair of ranks
  bool use_shared_memory = true;
  double connect_timeout_s = 0;
};

class World {
 public:
  /// Offset in a rank's piece at which the memory of process set 0 begins.
  static constexpr std::size_t kMemoryOffset = 4096;
  /// The `sequence` in the SegmentKey of process set 0's memory.
  static constexpr std::uint64_t kWorldMemory = UINT64_MAX;

  /// Exchanges the ranks' parameters and maps the memory of this host's ranks. All ranks must call it. `sockets`: by
  /// rank, first for control frames, then for tensors once per stream. `warnings` receives messages for the user.
  World(WorldOptions options, std::vector<Fd> sockets, WakeupEvent& wakeup,
        std::vector<std::string>& warnings);

  const WorldOptions& options() const noexcept { return options_; }
  const Membership& membership() const noexcept { return options_.membership; }
  Rank rank() const noexcept { return membership().self; }
  std::size_t size() const noexcept { return membership().size(); }
  /// The connection for control frames.
  ControlLink& link(Rank peer) { return links_[static_cast<std::size_t>(index_of(peer))]; }
  /// A connection for tensors.
  DataLink& data_link(Rank peer, std::size_t stream) {
    return data_links_[stream * size() + static_cast<std::size_t>(index_of(peer))];
  }
  /// The connections for control frames, by rank.
  std::span<ControlLink> links() noexcept { return links_; }
  /// The connections for tensors, by stream and rank.
  std::span<DataLink> data_links() noexcept { return data_links_; }
  std::span<const DataLink> data_links() const noexcept { return data_links_; }
  std::vector<ControlLink> take_links() noexcept { return std::move(links_); }
  std::vector<DataLink> take_data_links() noexcept { return std::move(data_links_); }
  WakeupEvent& wakeup() noexcept { return *wakeup_; }

  SpareMemory& spare_memory() noexcept { return spare_memory_; }

  /// The team of all ranks.
  const Team& team() const noexcept { return team_; }
  /// The team of a subset of the ranks.
  Team team_of(std::span<const Rank> members) const { return team_.restricted(members); }
  /// The memory of process set 0; null on an island of one rank.
  std::shared_ptr<Segment> memory() const noexcept {
    return team_.local_size() > 1 ? memory_ : nullptr;
  }

  /// The lane for messages in the memory of `owner`, for the rank `other` of its island.
  Lane* lane(Rank owner, Rank other) const;
  std::size_t ranks_of_own_host() const { return ranks_of_host().size() + 1; }

  /// The CPUs of each rank of this host. A rank without shared memory is assumed to have the same CPUs as this
  /// one.
  std::vector<CpuShare> cpu_shares() const;

  /// Holds this rank's liveness word: during its lifetime the other ranks of the host see that this process lives.
  class Life {
   public:
    explicit Life(LivenessWord* word) : word_(word) {
      if (word_ != nullptr) word_->hold();
    }
    Life(const Life&) = delete;
    ~Life() {
      if (word_ != nullptr) word_->release();
    }

   private:
    LivenessWord* word_;
  };
  Life hold_life() const;
  /// Time of this rank's last bytes on connections for tensors.
  TimePoint moved_at() const;
  /// Ranks of this host with a process that has ended without releasing its liveness word.
  std::vector<Rank> ended_mates() const;

  // Frames of operations that share new memory (see share_memory in collectives.h).
  void arrived(Rank from, const SegmentOffer& message);
  void arrived(Rank from, const SegmentMapped& message);
  struct Offer {
    bool has_memory = false;
    Fd memory;
  };
  const Offer* offer(const SegmentKey& key, Rank from) const;
  std::optional<Offer> take_offer(const SegmentKey& key, Rank from);
  std::optional<bool> mapped(const SegmentKey& key, Rank from) const;
  /// Number of frames of a rank that wait for operations of a process set.
  std::size_t num_offers(Rank from, std::int32_t process_set) const;
  std::size_t num_mapped(Rank from, std::int32_t process_set) const;
  void forget(const SegmentKey& key);

  /// In a forked child: closes the descriptors without notifying the peers.
  void close_descriptors() noexcept;

 private:
  std::vector<Rank> ranks_of_host() const;
  std::size_t memory_bytes() const noexcept;
  std::optional<Fd> create_memory(std::vector<std::string>& warnings);
  Hello own_hello() const;
  void check_hello(Rank peer, const Hello& hello) const;
  void exchange(std::vector<std::string>& warnings);
  bool map_local_peers(std::vector<std::string>& warnings);
  template <class Handle>
  void receive_one(FrameType type, TimePoint deadline, Handle handle);
  void form_islands(const std::vector<bool>& mapped);

  WorldOptions options_;
  WakeupEvent* wakeup_;
  CpuShare own_cpus_ = own_cpu_share();
  std::vector<ControlLink> links_;
  std::vector<DataLink> data_links_;
  Team team_;
  SpareMemory spare_memory_;
  std::shared_ptr<Segment> memory_;
  std::vector<Fd> mate_memory_;  // by rank, until mapped
  std::vector<Fd> mate_event_;
  std::map<std::pair<SegmentKey, Rank>, Offer> offers_;
  std::map<std::pair<SegmentKey, Rank>, bool> mapped_;
};

}  // namespace sparkhvd
