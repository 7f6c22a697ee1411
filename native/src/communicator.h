// The ranks of one process set at run time: the shared memory of their operations, and the order of bytes
// on their connections.
//
// **Threads.** Only the driver's thread uses it.
//
// **Ownership.** A rank writes the stages, mailboxes, slots and control ring only in its own piece of the memory. All
// ranks write claims. The coordinator writes how far it has read the ring of each rank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "segment.h"
#include "task.h"
#include "team.h"
#include "transport/control_ring.h"
#include "transport/data_link.h"
#include "transport/wakeup_event.h"
#include "types.h"
#include "world.h"

namespace sparkhvd {

/// Stages of a rank's work on data in shared memory.
enum class Stage : std::uint8_t {
  // The rank publishes how many chunks have reached these stages since the start:
  kCopiedIn,   // the rank has copied its part of the chunk into its slot
  kReduced,    // the rank's slice of the result is in its slot
  kCopiedOut,  // the rank has read its data from the slots of the other ranks
  // The rank publishes how many operations have reached this stage since the start:
  kPassed,  // the rank no longer reads the memory of earlier operations
};
inline constexpr std::size_t kNumStages = 4;

/// Parameters that may change between two operations; all ranks change them at the same operation.
struct Knobs {
  std::uint64_t chunk_bytes = 0;   // bytes of a pipeline step in shared memory; at most a slot
  std::uint64_t streams = 1;       // connections for tensors per pair of ranks
  std::uint64_t direct_ranks = 0;  // up to this number of islands, each exchanges with all others
};

class Communicator {
 public:
  /// Bytes that one process set needs in each rank's piece of shared memory.
  static std::size_t memory_bytes(const WorldOptions& options) noexcept;

  /// `memory`: each rank's piece begins at `offset`; nullptr for an island of one rank.
  Communicator(World& world, std::int32_t process_set, Team team, std::shared_ptr<Segment> memory,
               std::size_t offset);

  World& world() const noexcept { return *world_; }
  std::int32_t process_set() const noexcept { return process_set_; }
  const Team& team() const noexcept { return team_; }
  Knobs& knobs() noexcept { return knobs_; }
  const Knobs& knobs() const noexcept { return knobs_; }

  // Shared memory of the island, which exists only if the island has more than one rank. `chunk` counts chunks since
  // the start.
  bool has_memory() const noexcept { return memory_ != nullptr; }
  std::size_t slot_bytes() const noexcept { return world_->options().slot_bytes; }
  std::uint64_t num_slots() const noexcept { return world_->options().slots; }
  std::byte* own_slot(std::uint64_t chunk) const { return slot_of(team_.self(), chunk); }
  const std::byte* slot(Rank rank, std::uint64_t chunk) const { return slot_of(rank, chunk); }
  /// Number of the next chunk. It is equal on all ranks of the island between operations.
  std::uint64_t next_chunk() const noexcept { return next_chunk_; }
  void advance_chunks(std::uint64_t count) noexcept { next_chunk_ += count; }
  /// Notifies the island that this rank has done `stage` for all chunks or operations before `count`.
  void publish(Stage stage, std::uint64_t count) noexcept;

  /// Holds when the given ranks of the island have done `stage` for all chunks or operations before `count`.
  class Reached final : public Condition {
   public:
    Reached(const Communicator& communicator, const std::vector<Rank>& ranks, Stage stage,
            std::uint64_t count)
        : communicator_(&communicator), ranks_(&ranks), stage_(stage), count_(count) {}
    bool ready() const override;
    std::vector<Rank> awaited() const override;

   private:
    bool has_reached(Rank rank) const;
    const Communicator* communicator_;
    const std::vector<Rank>* ranks_;
    Stage stage_;
    std::uint64_t count_;
  };
  /// Waits for the participants in this rank's island. `team` has the participants and must outlive the wait.
  Reached reached(const Team& team, Stage stage, std::uint64_t count) const {
    return {*this, team.island(), stage, count};
  }

  // Claims: any rank of the island may claim any chunk of an operation on registered memory. Each operation has a pair
  // of words. The operation kClaimWords later uses the same pair.
  static constexpr std::uint64_t kClaimWords = 16;
  struct Claim {
    SharedWord next;  // sequence << 32 | chunks claimed so far
    SharedWord done;  // sequence << 32 | chunks finished so far
  };
  /// The words in `rank`'s memory for operation number `sequence` of the process set. Do not use them before every rank
  /// has passed operation `sequence - kClaimWords`.
  Claim& claim(Rank rank, std::uint64_t sequence) const noexcept;
  /// Holds when all ranks of the island, participants or not, have passed the last operation that used the words.
  Reached claim_is_free(std::uint64_t sequence) const {
    return {*this, team_.island(), Stage::kPassed,
            sequence >= kClaimWords ? sequence - kClaimWords + 1 : 0};
  }
  /// Wakes the sleeping ranks of the island after a change of a claim, because they may wait for it.
  void ring() noexcept { world_->wakeup().ring(team_.island()); }

  // Control frames between the coordinator (the first rank) and the other ranks, if all share memory.
  bool has_control_rings() const noexcept { return has_memory() && team_.is_one_island(); }
  /// Sends a frame to the coordinator, or from the coordinator to all other ranks. False if the frame must use the
  /// connections.
  bool tell_coordinator(const Bytes& frame);
  bool tell_members(const Bytes& frame);
  /// Readers of the frames to this rank: from every member if it is the coordinator, else from the coordinator.
  std::vector<ControlReader>& control_readers() noexcept { return control_readers_; }

  // Mailboxes: small tensors are copied here at submission, so that no rank waits for a busy rank. The address of a
  // mailbox is a Place in registered memory. A mailbox is free again when all ranks of the island have passed the
  // operation that used it. The first kLargeMailboxes are large. The small mailboxes behind them exist because a
  // training step may submit many small tensors together.
  static constexpr std::size_t kLargeMailboxes = 16;
  static constexpr std::size_t kMailboxes = kLargeMailboxes + 48;
  std::size_t mailbox_bytes() const noexcept;
  struct Mailbox {
    std::size_t index = 0;
    Place place;
    std::byte* data = nullptr;
  };
  std::optional<Mailbox> take_mailbox(std::size_t bytes);
  /// Records the number `sequence` that the negotiation gave to the mailbox's operation.
  void address(std::size_t mailbox, std::uint64_t sequence) noexcept;
  /// Frees a mailbox whose operation will not run.
  void free_mailbox(std::size_t mailbox) noexcept;
  /// This process set's memory as a registered segment, so that a Place can name a mailbox in it.
  const Segment* segment() const noexcept { return memory_.get(); }

  // Bytes on the connections: the tensor bytes of this process set from one rank to another are cut into blocks. The
  // blocks use the connections of the pair round-robin. Both ranks count the bytes, so they know a block's connection.
  static constexpr std::uint64_t kBlockBytes = 128 << 10;
  struct Part {
    std::size_t stream;
    std::size_t bytes;
  };
  Part next_send(Rank to, std::size_t bytes) { return next_part(sent_[index(to)], bytes); }
  Part next_receive(Rank from, std::size_t bytes) {
    return next_part(received_[index(from)], bytes);
  }
  /// Counts bytes from 0 again, after a change of the number of streams.
  void restart_streams();

 private:
  /// A rank's control ring, and how many frames of the rings have been read.
  struct Control {
    SharedWord taken;     // what the coordinator has read of this rank's ring
    SharedWord received;  // what this rank has read of the coordinator's ring
    ControlRing ring;
  };
  struct Region {
    SharedWord* stages = nullptr;  // [kNumStages]
    Claim* claims = nullptr;       // [kClaimWords]
    Control* control = nullptr;
    std::byte* mailboxes = nullptr;
    std::byte* slots = nullptr;
  };
  enum class MailboxState : std::uint8_t { kFree, kTaken, kAddressed };
  struct MailboxEntry {
    MailboxState state = MailboxState::kFree;
    std::uint64_t sequence = 0;
  };

  static std::size_t index(Rank rank) noexcept { return static_cast<std::size_t>(index_of(rank)); }
  const Region& region(Rank rank) const { return regions_[index(rank)]; }
  std::byte* slot_of(Rank rank, std::uint64_t chunk) const {
    return region(rank).slots + (chunk % num_slots()) * slot_bytes();
  }
  Part next_part(std::uint64_t& position, std::size_t bytes) const;
  void open_control_rings();

  World* world_;
  std::int32_t process_set_;
  Team team_;
  std::shared_ptr<Segment> memory_;
  std::size_t offset_;
  Knobs knobs_;
  std::vector<Region> regions_;  // by rank
  std::optional<ControlWriter> control_writer_;
  std::vector<ControlReader> control_readers_;
  std::uint64_t next_chunk_ = 0;
  std::array<MailboxEntry, kMailboxes> mailboxes_{};
  std::vector<std::uint64_t> sent_;  // bytes by rank
  std::vector<std::uint64_t> received_;
};

/// Sends and receives of one step of a collective.
class Transfers {
 public:
  explicit Transfers(Communicator& communicator) : communicator_(&communicator) {}

  void send(Rank to, std::span<const std::byte> payload);
  void receive(Rank from, std::span<std::byte> target);

  /// Holds when all sends, or all receives, that this object has started are done.
  class Done final : public Condition {
   public:
    struct Entry {
      Rank peer;
      std::size_t stream;
      DataLink::Ticket ticket;
    };
    Done(World& world, const std::vector<Entry>& entries, bool is_send)
        : world_(&world), entries_(&entries), is_send_(is_send) {}
    bool ready() const override;
    std::vector<Rank> awaited() const override;
    TimePoint moved_at() const override;

   private:
    bool is_done(const Entry& entry) const;
    World* world_;
    const std::vector<Entry>* entries_;
    bool is_send_;
  };
  Done all_sent() const { return {communicator_->world(), sends_, true}; }
  Done all_received() const { return {communicator_->world(), receives_, false}; }

 private:
  Communicator* communicator_;
  std::vector<Done::Entry> sends_;
  std::vector<Done::Entry> receives_;
};

}  // namespace sparkhvd
