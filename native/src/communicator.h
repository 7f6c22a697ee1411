// The ranks of one process set at run time: the shared memory of their operations, and the order of bytes
// on their connections.
//
// **Threads.** The driver's.
//
// **Ownership.** A rank writes the stages, mailboxes, slots and control ring of its own piece only; the
// claims are written by all, and the coordinator writes how far it has read the others' rings.
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

/// Progress of a rank with data in shared memory.
enum class Stage : std::uint8_t {
  // Counts of chunks since the start:
  kCopiedIn,   // its part of the chunk is in its slot
  kReduced,    // its slice of the result is in its slot
  kCopiedOut,  // it has read its data from the others' slots
  // Count of operations since the start:
  kPassed,  // it no longer reads the memory of earlier operations
};
inline constexpr std::size_t kNumStages = 4;

/// Parameters that may change between two operations, at the same operation on all ranks.
struct Knobs {
  std::uint64_t chunk_bytes = 0;   // of a pipeline step in shared memory; at most a slot
  std::uint64_t streams = 1;       // connections per pair for tensors
  std::uint64_t direct_ranks = 0;  // up to that many islands exchange with each other directly
};

class Communicator {
 public:
  /// Bytes of a rank's piece of the memory of one process set.
  static std::size_t memory_bytes(const WorldOptions& options) noexcept;

  /// `memory`: each rank's piece begins at `offset`; nullptr for an island of one rank.
  Communicator(World& world, std::int32_t process_set, Team team, std::shared_ptr<Segment> memory,
               std::size_t offset);

  World& world() const noexcept { return *world_; }
  std::int32_t process_set() const noexcept { return process_set_; }
  const Team& team() const noexcept { return team_; }
  Knobs& knobs() noexcept { return knobs_; }
  const Knobs& knobs() const noexcept { return knobs_; }

  // Shared memory of the island; only if it has more than one rank. `chunk` is a number since the
  // start.
  bool has_memory() const noexcept { return memory_ != nullptr; }
  std::size_t slot_bytes() const noexcept { return world_->options().slot_bytes; }
  std::uint64_t num_slots() const noexcept { return world_->options().slots; }
  std::byte* own_slot(std::uint64_t chunk) const { return slot_of(team_.self(), chunk); }
  const std::byte* slot(Rank rank, std::uint64_t chunk) const { return slot_of(rank, chunk); }
  /// Number of the next chunk; equal on all ranks of the island between operations.
  std::uint64_t next_chunk() const noexcept { return next_chunk_; }
  void advance_chunks(std::uint64_t count) noexcept { next_chunk_ += count; }
  /// Notifies the island that this rank has done `stage` for everything before `count`.
  void publish(Stage stage, std::uint64_t count) noexcept;

  /// The given ranks of the island have done `stage` for everything before `count`.
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
  /// `team`: the participants; lives as long as the wait.
  Reached reached(const Team& team, Stage stage, std::uint64_t count) const {
    return {*this, team.island(), stage, count};
  }

  // Claims: any rank of the island may claim any chunk of an operation on registered memory. Each
  // operation has a pair of words, reused kClaimWords operations later.
  static constexpr std::uint64_t kClaimWords = 16;
  struct Claim {
    SharedWord next;  // sequence << 32 | chunks claimed so far
    SharedWord done;  // sequence << 32 | chunks finished so far
  };
  /// The words of the operation with number `sequence` of the process set, one pair in the memory of
  /// each rank of the island. They must not be touched before every rank has passed operation
  /// `sequence - kClaimWords`.
  Claim& claim(Rank rank, std::uint64_t sequence) const noexcept;
  /// All ranks of the island (also those that take no part) have passed the last operation that used the
  /// words.
  Reached claim_is_free(std::uint64_t sequence) const {
    return {*this, team_.island(), Stage::kPassed,
            sequence >= kClaimWords ? sequence - kClaimWords + 1 : 0};
  }
  /// Wakes the sleeping ranks of the island, after a change of a claim that they wait for.
  void ring() noexcept { world_->wakeup().ring(team_.island()); }

  // Control frames between the coordinator, the first rank, and the others, if all share memory.
  bool has_control_rings() const noexcept { return has_memory() && team_.is_one_island(); }
  /// To the coordinator, or from it to all others. False if the frame must use the connections.
  bool tell_coordinator(const Bytes& frame);
  bool tell_members(const Bytes& frame);
  /// Messages to this rank: from members to the coordinator, or from the coordinator to a member.
  std::vector<ControlReader>& control_readers() noexcept { return control_readers_; }

  // Mailboxes: small tensors are copied here at submission, so that no rank waits for a busy rank. A
  // mailbox is a place like any other. It is free when all ranks of the island have passed the
  // operation that used it.
  // Mailboxes behind the large ones hold few bytes, because a step may submit many small tensors together.
  static constexpr std::size_t kLargeMailboxes = 16;
  static constexpr std::size_t kMailboxes = kLargeMailboxes + 48;
  std::size_t mailbox_bytes() const noexcept;
  struct Mailbox {
    std::size_t index = 0;
    Place place;
    std::byte* data = nullptr;
  };
  std::optional<Mailbox> take_mailbox(std::size_t bytes);
  /// Its operation has been negotiated as number `sequence`.
  void address(std::size_t mailbox, std::uint64_t sequence) noexcept;
  /// The operation will not run.
  void free_mailbox(std::size_t mailbox) noexcept;
  /// Own memory as a registered segment, for places in it.
  const Segment* segment() const noexcept { return memory_.get(); }

  // Bytes on the connections: the stream of tensor bytes of this process set between two ranks is
  // cut into blocks, which use the connections of the pair round-robin. Both ends count.
  static constexpr std::uint64_t kBlockBytes = 128 << 10;
  struct Part {
    std::size_t stream;
    std::size_t bytes;
  };
  Part next_send(Rank to, std::size_t bytes) { return next_part(sent_[index(to)], bytes); }
  Part next_receive(Rank from, std::size_t bytes) {
    return next_part(received_[index(from)], bytes);
  }
  /// After a change of the number of streams.
  void restart_streams();

 private:
  /// A rank's progress, and how far its ring has been read.
  struct Control {
    SharedWord taken;     // of this rank's ring by the coordinator
    SharedWord received;  // of the coordinator's ring by this rank
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

  /// All sends / receives so far through this object are done.
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
