// The plan of a process set as one of its ranks knows it: operations that come again, by number. Their coordinator
// numbers them (see negotiation.h). Pure: no sockets.
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
    Execute order;          // and what this rank was told to run
  };

  /// Returns the number of an operation that is submitted as the last time.
  std::optional<std::uint32_t> find(const Operation& operation) const {
    const auto entry = numbers_.find(operation.name);
    if (entry == numbers_.end() || entries_[entry->second].descriptor != operation.descriptor) {
      return std::nullopt;
    }
    return entry->second;
  }

  /// Throws Error if there is no such operation.
  const Entry& at(std::uint32_t number) const {
    if (number >= entries_.size()) throw nonsense("an operation that no plan has");
    return entries_[number];
  }

  /// Remembers an order with a number. Throws Error if it cannot have this one.
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
    entries_[number].order.number.reset();  // once is enough
  }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::uint32_t> numbers_;
};

}  // namespace sparkhvd
