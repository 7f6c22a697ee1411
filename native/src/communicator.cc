#include "communicator.h"

#include <algorithm>

#include "error.h"

namespace sparkhvd {
namespace {

// Largest tensor that every rank of a host reduces by itself. For larger tensors it is faster to divide the work.
constexpr std::size_t kMailboxBytes = 32 << 10;
constexpr std::size_t kSmallMailboxBytes = 4 << 10;
// With more hosts than this the messages of a direct exchange get short, and a ring is faster.
constexpr std::size_t kDirectRanks = 16;

constexpr std::size_t kStagesBytes = 4096;
constexpr std::size_t kClaimsBytes = 4096;
constexpr std::size_t kControlBytes = ControlRing::kBytes + 4096;
static_assert(kNumStages * sizeof(SharedWord) <= kStagesBytes);
static_assert(Communicator::kClaimWords * sizeof(Communicator::Claim) <= kClaimsBytes);

std::size_t mailbox_size(const WorldOptions& options) {
  return std::min<std::size_t>(kMailboxBytes, options.slot_bytes);
}

/// Offset of mailbox `number`; for `number` = kMailboxes, the end of the last mailbox.
std::size_t mailbox_offset(const WorldOptions& options, std::size_t number) {
  const std::size_t large = std::min(number, Communicator::kLargeMailboxes);
  return large * mailbox_size(options) + (number - large) * kSmallMailboxBytes;
}

}  // namespace

std::size_t Communicator::memory_bytes(const WorldOptions& options) noexcept {
  static_assert(sizeof(Control) <= kControlBytes);
  return kStagesBytes + kClaimsBytes + kControlBytes + mailbox_offset(options, kMailboxes) +
         options.slot_bytes * options.slots;
}

Communicator::Communicator(World& world, std::int32_t process_set, Team team,
                           std::shared_ptr<Segment> memory, std::size_t offset)
    : world_(&world),
      process_set_(process_set),
      team_(std::move(team)),
      memory_(std::move(memory)),
      offset_(offset),
      sent_(world.size()),
      received_(world.size()) {
  knobs_.chunk_bytes = world.options().slot_bytes;
  knobs_.streams = world.options().streams;
  knobs_.direct_ranks = kDirectRanks;
  if (!has_memory()) return;
  regions_.resize(world.size());
  for (const Rank rank : team_.island()) {
    std::byte* piece = memory_->data(rank) + offset_;
    Region& region = regions_[index(rank)];
    region.stages = reinterpret_cast<SharedWord*>(piece);
    region.claims = reinterpret_cast<Claim*>(piece + kStagesBytes);
    region.control = reinterpret_cast<Control*>(piece + kStagesBytes + kClaimsBytes);
    region.mailboxes = piece + kStagesBytes + kClaimsBytes + kControlBytes;
    region.slots = region.mailboxes + mailbox_offset(world.options(), kMailboxes);
  }
  if (has_control_rings()) open_control_rings();
}

void Communicator::open_control_rings() {
  const Rank self = team_.self();
  const Rank coordinator = team_.ranks()[0];
  control_writer_.emplace(region(self).control->ring);
  if (self != coordinator) {
    control_readers_.emplace_back(coordinator, region(coordinator).control->ring,
                                  region(self).control->received);
    return;
  }
  for (const Rank rank : team_.ranks()) {
    if (rank == self) continue;
    Control& control = *region(rank).control;
    control_readers_.emplace_back(rank, control.ring, control.taken);
  }
}

bool Communicator::tell_coordinator(const Bytes& frame) {
  const SharedWord& taken = region(team_.self()).control->taken;
  if (!control_writer_->write(frame, taken.value.load(std::memory_order_acquire))) return false;
  world_->wakeup().ring(team_.ranks().first(1));
  return true;
}

bool Communicator::tell_members(const Bytes& frame) {
  std::uint64_t received = UINT64_MAX;
  for (const Rank rank : team_.ranks()) {
    if (rank == team_.self()) continue;
    received =
        std::min(received, region(rank).control->received.value.load(std::memory_order_acquire));
  }
  if (!control_writer_->write(frame, received)) return false;
  world_->wakeup().ring(team_.ranks());
  return true;
}

void Communicator::publish(Stage stage, std::uint64_t count) noexcept {
  // seq_cst orders this store before the read of the peers' sleep words: see transport/wakeup_event.h.
  region(team_.self())
      .stages[static_cast<std::size_t>(stage)]
      .value.store(count, std::memory_order_seq_cst);
  ring();
}

bool Communicator::Reached::has_reached(Rank rank) const {
  const auto& word = communicator_->region(rank).stages[static_cast<std::size_t>(stage_)].value;
  return word.load(std::memory_order_seq_cst) >= count_;
}

bool Communicator::Reached::ready() const {
  return std::ranges::all_of(*ranks_, [this](Rank rank) { return has_reached(rank); });
}

std::vector<Rank> Communicator::Reached::awaited() const {
  std::vector<Rank> ranks;
  std::ranges::copy_if(*ranks_, std::back_inserter(ranks),
                       [this](Rank rank) { return !has_reached(rank); });
  return ranks;
}

Communicator::Claim& Communicator::claim(Rank rank, std::uint64_t sequence) const noexcept {
  return region(rank).claims[sequence % kClaimWords];
}

std::size_t Communicator::mailbox_bytes() const noexcept { return mailbox_size(world_->options()); }

std::optional<Communicator::Mailbox> Communicator::take_mailbox(std::size_t bytes) {
  if (!has_memory()) return std::nullopt;
  // A small tensor takes a large mailbox only if no small mailbox is free.
  const bool is_small = bytes <= kSmallMailboxBytes;
  const std::size_t first = is_small ? kLargeMailboxes : 0;
  const std::size_t count = is_small ? kMailboxes : kLargeMailboxes;
  for (std::size_t step = 0; step < count; ++step) {
    const std::size_t i = (first + step) % kMailboxes;
    MailboxEntry& entry = mailboxes_[i];
    if (entry.state == MailboxState::kAddressed &&
        reached(team_, Stage::kPassed, entry.sequence + 1).ready()) {
      entry.state = MailboxState::kFree;
    }
    if (entry.state != MailboxState::kFree) continue;
    entry.state = MailboxState::kTaken;
    std::byte* data = region(team_.self()).mailboxes + mailbox_offset(world_->options(), i);
    const auto offset = static_cast<std::uint64_t>(data - memory_->data(team_.self()));
    return Mailbox{i, Place{memory_->key(), offset}, data};
  }
  return std::nullopt;
}

void Communicator::address(std::size_t mailbox, std::uint64_t sequence) noexcept {
  mailboxes_[mailbox] = {MailboxState::kAddressed, sequence};
}

void Communicator::free_mailbox(std::size_t mailbox) noexcept {
  mailboxes_[mailbox].state = MailboxState::kFree;
}

Communicator::Part Communicator::next_part(std::uint64_t& position, std::size_t bytes) const {
  if (knobs_.streams == 1) return {0, bytes};
  const std::uint64_t left = kBlockBytes - position % kBlockBytes;
  const Part part{static_cast<std::size_t>(position / kBlockBytes % knobs_.streams),
                  static_cast<std::size_t>(std::min<std::uint64_t>(bytes, left))};
  position += part.bytes;
  return part;
}

void Communicator::restart_streams() {
  std::ranges::fill(sent_, 0);
  std::ranges::fill(received_, 0);
}

void Transfers::send(Rank to, std::span<const std::byte> payload) {
  while (!payload.empty()) {
    const auto part = communicator_->next_send(to, payload.size());
    DataLink& link = communicator_->world().data_link(to, part.stream);
    const auto ticket = link.send_data(communicator_->process_set(), payload.first(part.bytes));
    sends_.push_back({to, part.stream, ticket});
    payload = payload.subspan(part.bytes);
  }
}

void Transfers::receive(Rank from, std::span<std::byte> target) {
  while (!target.empty()) {
    const auto part = communicator_->next_receive(from, target.size());
    World& world = communicator_->world();
    const std::int32_t process_set = communicator_->process_set();
    DataLink& link = world.data_link(from, part.stream);
    const auto ticket = link.receive_data(process_set, target.first(part.bytes));
    receives_.push_back({from, part.stream, ticket});
    target = target.subspan(part.bytes);
    if (const auto bytes = link.take_credit(process_set)) {
      const auto connection = static_cast<std::uint32_t>(part.stream);
      world.link(from).send(encode(Credit{process_set, connection, *bytes}));
    }
  }
}

bool Transfers::Done::is_done(const Entry& entry) const {
  const DataLink& link = world_->data_link(entry.peer, entry.stream);
  return is_send_ ? link.sent(entry.ticket) : link.received(entry.ticket);
}

bool Transfers::Done::ready() const {
  return std::ranges::all_of(*entries_, [this](const Entry& entry) { return is_done(entry); });
}

TimePoint Transfers::Done::moved_at() const {
  TimePoint earliest = kNever;
  for (const auto& entry : *entries_) {
    if (is_done(entry)) continue;
    const DataLink& link = world_->data_link(entry.peer, entry.stream);
    earliest = std::min(earliest, is_send_ ? link.written_at() : link.read_at());
  }
  return earliest;
}

std::vector<Rank> Transfers::Done::awaited() const {
  std::vector<Rank> ranks;
  for (const auto& entry : *entries_) {
    if (!is_done(entry) && std::ranges::count(ranks, entry.peer) == 0) ranks.push_back(entry.peer);
  }
  return ranks;
}

}  // namespace sparkhvd
