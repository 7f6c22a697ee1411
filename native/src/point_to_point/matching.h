// Matches receives with messages: a receive gets the first message with its sender, tag and process set. The class has
// no sockets and no clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <optional>

#include "types.h"

namespace sparkhvd {

/// The matching key of a message.
struct Address {
  std::int32_t process_set = 0;
  Rank from{};
  std::int64_t tag = 0;
  bool operator==(const Address&) const = default;
};

/// Sender of a receive that accepts a message from any rank of the set.
inline constexpr Rank kAnyRank{-1};

template <class Receive, class Message>
class Matching {
 public:
  struct Posted {
    Address address;
    Receive receive;
    std::uint64_t place;
  };
  struct Arrived {
    Address address;
    Message message;
  };

  /// Takes the first message that matches the receive. If there is no match, the receive waits, ordered by `place`. A
  /// receive that has lost a withdrawn message comes back with its old place.
  std::optional<Arrived> post(const Address& address, Receive receive,
                              std::uint64_t place = ~std::uint64_t{0}) {
    for (auto entry = arrived_.begin(); entry != arrived_.end(); ++entry) {
      if (!fits(address, entry->address)) continue;
      auto found = std::move(*entry);
      arrived_.erase(entry);
      return found;
    }
    const auto next =
        std::ranges::find_if(posted_, [place](const Posted& entry) { return entry.place > place; });
    posted_.insert(next, {address, std::move(receive), place});
    return std::nullopt;
  }

  /// Takes the first receive that matches a new message. If there is no match, it moves the message and keeps it.
  std::optional<Posted> arrive(const Address& address, Message&& message) {
    auto found = take_posted(address);
    if (!found) arrived_.push_back({address, std::move(message)});
    return found;
  }

  /// Takes the first receive that matches a message with this address, if any.
  std::optional<Posted> take_posted(const Address& address) {
    for (auto entry = posted_.begin(); entry != posted_.end(); ++entry) {
      if (!fits(entry->address, address)) continue;
      auto found = std::move(*entry);
      posted_.erase(entry);
      return found;
    }
    return std::nullopt;
  }

  std::list<Posted>& posted() noexcept { return posted_; }
  const std::list<Posted>& posted() const noexcept { return posted_; }
  std::list<Arrived>& arrived() noexcept { return arrived_; }
  const std::list<Arrived>& arrived() const noexcept { return arrived_; }

 private:
  static bool fits(const Address& receive, const Address& message) noexcept {
    return receive.process_set == message.process_set && receive.tag == message.tag &&
           (receive.from == kAnyRank || receive.from == message.from);
  }

  std::list<Posted> posted_;    // ordered by `place`
  std::list<Arrived> arrived_;  // in the order of arrival
};

}  // namespace sparkhvd
