// A rank's copy of the plan of a process set: repeated operations, by number. The coordinator gives the numbers (see
// negotiation.h). No I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "error.h"
#include "message.h"
#include "operation.h"

namespace sparkhvd {

class Plan {
 public:
  struct Entry {
    std::string name;
    Descriptor descriptor;  // as this rank has submitted it
    Execute order;          // as this rank has received it
  };

  /// The number of an operation; std::nullopt if it has no number or its description has changed.
  std::optional<std::uint32_t> find(const Operation& operation) const {
    const auto entry = numbers_.find(operation.name);
    if (entry == numbers_.end() || entries_[entry->second].descriptor != operation.descriptor) {
      return std::nullopt;
    }
    return entry->second;
  }

  /// The entry of a number. Throws Error if it does not exist.
  const Entry& at(std::uint32_t number) const {
    if (number >= entries_.size()) throw nonsense("an operation number that is not in the plan");
    return entries_[number];
  }

  /// Stores an order with a number. Throws Error if the plan has the number for another name, or leaves a gap.
  void remember(const Operation& operation, const Execute& order) {
    const std::uint32_t number = *order.number;
    if (number == entries_.size()) {
      entries_.push_back({operation.name, {}, {}});
      numbers_.emplace(operation.name, number);
    } else if (number > entries_.size() || entries_[number].name != operation.name) {
      throw nonsense("a number that the plan has for another operation");
    }
    entries_[number].descriptor = operation.descriptor;
    entries_[number].order = order;
    entries_[number].order.number.reset();  // so that later runs do not store the order again
  }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::uint32_t> numbers_;
};

}  // namespace sparkhvd
