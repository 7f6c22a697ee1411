// The plan: numbers for repeated operations (see negotiation.h).
#include <algorithm>
#include <bit>
#include <utility>

#include "engine/negotiation.h"
#include "error.h"

namespace sparkhvd {
namespace {

/// Digest of the ranks' descriptions. If different descriptions have equal digests, no harm is done: the plan stores
/// the last description.
class Digest {
 public:
  void add(const Descriptor& descriptor) {
    add(static_cast<std::uint64_t>(descriptor.collective));
    add(static_cast<std::uint64_t>(descriptor.dtype));
    add(static_cast<std::uint64_t>(descriptor.reduce_op));
    add(static_cast<std::uint64_t>(index_of(descriptor.root)));
    add(std::bit_cast<std::uint64_t>(descriptor.prescale));
    add(std::bit_cast<std::uint64_t>(descriptor.postscale));
    add(std::bit_cast<std::uint64_t>(descriptor.timeout_s));
    for (const auto& shape : descriptor.shapes) add(shape);
    add(descriptor.numbers);
    add(descriptor.room);
    if (!descriptor.place) return;
    add(descriptor.place->segment.sequence);
    add(descriptor.place->offset);
  }
  std::uint64_t value() const noexcept { return value_; }

 private:
  void add(std::uint64_t number) {
    value_ = (value_ ^ number) * 0x9e3779b97f4a7c15U;
    value_ ^= value_ >> 32;
  }
  void add(const std::vector<std::int64_t>& numbers) {
    add(numbers.size());
    for (const auto number : numbers) add(static_cast<std::uint64_t>(number));
  }

  std::uint64_t value_ = 0;
};

}  // namespace

/// Returns the number of a repeated operation, if the plan has room, and stores the descriptions of all ranks.
std::optional<std::uint32_t> Negotiation::plan(const std::string& name, const Pending& pending) {
  Digest digest;
  for (const auto& descriptor : pending.arrived) digest.add(*descriptor);
  // Drops names without a number when there are many, because generated names never repeat.
  if (seen_.size() >= 2 * kMaxPlanned && !seen_.contains(name)) {
    std::erase_if(seen_, [](const auto& entry) { return !entry.second.number; });
  }
  const auto [entry, is_new] = seen_.try_emplace(name);
  Seen& seen = entry->second;
  if (std::exchange(seen.digest, digest.value()) != digest.value() || is_new) return std::nullopt;
  if (!seen.number) {
    if (planned_.size() == kMaxPlanned) return std::nullopt;
    seen.number = static_cast<std::uint32_t>(planned_.size());
    planned_.push_back({name, {}});
  }
  Planned& planned = planned_[*seen.number];
  planned.descriptors = pending.arrived;
  // The descriptions are equal on most ranks, so equal descriptions are stored once.
  for (auto& descriptor : planned.descriptors) {
    if (*descriptor == *planned.descriptors[0]) descriptor = planned.descriptors[0];
  }
  return seen.number;
}

Negotiation::Outcome Negotiation::ready_again(Rank from, std::uint32_t number, TimePoint now) {
  if (number >= planned_.size()) throw nonsense("an operation number that is not in the plan");
  Planned& planned = planned_[number];
  if (!refused_.empty()) {
    if (auto refusal = take_refusal(from, planned.name)) return std::move(*refusal);
  }
  if (planned.pending == nullptr) {
    planned.pending = &pending_[planned.name];
    planned.pending->number = number;
  }
  ++planned.pending->num_planned;
  return arrive(from, *planned.pending, planned.name, planned.descriptors[member_index(from)], now);
}

}  // namespace sparkhvd
