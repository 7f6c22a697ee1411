#include <algorithm>
#include <array>

#include "collectives/spec.h"
#include "error.h"
#include "team.h"
#include "text.h"

namespace sparkhvd {

extern const CollectiveSpec kAllreduceSpec;
extern const CollectiveSpec kAllgatherSpec;
extern const CollectiveSpec kBroadcastSpec;
extern const CollectiveSpec kBarrierSpec;
extern const CollectiveSpec kAlltoallSpec;
extern const CollectiveSpec kReducescatterSpec;
extern const CollectiveSpec kJoinSpec;
extern const CollectiveSpec kAddProcessSetSpec;
extern const CollectiveSpec kRemoveProcessSetSpec;
extern const CollectiveSpec kRegisterSpec;
extern const CollectiveSpec kConfigureSpec;
extern const CollectiveSpec kAllgatherIntoSpec;
extern const CollectiveSpec kReduceSpec;
extern const CollectiveSpec kGatherSpec;
extern const CollectiveSpec kScatterSpec;
extern const CollectiveSpec kSendSpec;
extern const CollectiveSpec kReceiveSpec;

namespace {

constexpr std::array<const CollectiveSpec*, kNumCollectives> kTable = {
    &kAllreduceSpec,        &kAllgatherSpec,     &kBroadcastSpec, &kBarrierSpec,
    &kAlltoallSpec,         &kReducescatterSpec, &kJoinSpec,      &kAddProcessSetSpec,
    &kRemoveProcessSetSpec, &kRegisterSpec,      &kConfigureSpec, &kAllgatherIntoSpec,
    &kReduceSpec,           &kGatherSpec,        &kScatterSpec,   &kSendSpec,
    &kReceiveSpec,
};

}  // namespace

std::span<const CollectiveSpec* const> collective_table() noexcept { return kTable; }

const CollectiveSpec& spec_of(Collective collective) {
  return *kTable[static_cast<std::size_t>(collective)];
}

void Submitted::refuse(const std::string& text) const { invalid(label + ": " + text); }

void take_digest(const Submitted& submitted) {
  if (submitted.descriptor.numbers.size() > 1) {
    submitted.refuse("it takes either no splits or one number, the digest of a group.");
  }
}

void take_no_numbers(const Submitted& submitted) {
  if (!submitted.descriptor.numbers.empty()) submitted.refuse("it takes no splits.");
}

void take_splits(const Submitted& submitted) {
  const auto& shape = submitted.descriptor.shapes[0];
  const std::size_t size = submitted.members.size();
  if (shape.empty()) {
    submitted.refuse("the tensor is a scalar; " +
                     std::string(name_of(submitted.descriptor.collective)) +
                     " divides the first dimension.");
  }
  auto& numbers = submitted.descriptor.numbers;
  if (!submitted.has_numbers) {
    const auto parts = static_cast<std::int64_t>(size);
    if (shape[0] % parts != 0) {
      submitted.refuse("the first dimension is " + std::to_string(shape[0]) +
                       " and cannot be divided among " + std::to_string(size) +
                       " ranks equally. Give splits.");
    }
    numbers.assign(size, shape[0] / parts);
    return;
  }
  if (numbers.size() != size) {
    submitted.refuse(std::to_string(numbers.size()) + " splits were given for " +
                     std::to_string(size) + " ranks. Give one split per rank of the process set.");
  }
  std::int64_t left = shape[0];
  for (const auto rows : numbers) {
    if (rows < 0 || rows > left) {
      submitted.refuse("the splits are " + numbers_text(numbers) +
                       "; they must be 0 or more, and their sum at most the first dimension, " +
                       std::to_string(shape[0]) + ".");
    }
    left -= rows;
  }
}

void write_first_dimensions(std::span<const Descriptor* const> by_member, Execute& order) {
  for (std::size_t tensor = 0; tensor < by_member.front()->shapes.size(); ++tensor) {
    for (const Descriptor* descriptor : by_member) {
      const auto& shape = descriptor->shapes[tensor];
      order.rows.push_back(shape.empty() ? 1 : shape[0]);
    }
  }
}

std::size_t count_first_dimensions(const Descriptor& descriptor, std::size_t members) {
  return members * descriptor.shapes.size();
}

bool are_first_dimensions_possible(const Received& received) {
  const auto& [descriptor, order, team] = received;
  const std::size_t members = team.size();
  if (order.rows.size() != members * descriptor.shapes.size()) return false;
  for (std::size_t i = 0; i < order.rows.size(); ++i) {
    const auto& shape = descriptor.shapes[i / members];
    if (!is_possible(descriptor, i / members, order.rows[i])) return false;
    if (i % members == team.index() && order.rows[i] != (shape.empty() ? 1 : shape[0])) {
      return false;
    }
  }
  return true;
}

bool is_possible(const Descriptor& descriptor, std::size_t tensor, std::int64_t rows) {
  std::vector<std::int64_t> shape = descriptor.shapes.at(tensor);
  if (shape.empty()) return rows == 1;
  shape[0] = rows;
  return count_elements(shape, descriptor.dtype).has_value();
}

}  // namespace sparkhvd
