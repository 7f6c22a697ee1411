// Hosts that have vanished: without power or cable nobody says that a connection is over.
//
// A kernel answers for its processes, whether they run, are stopped, starved or behind. So a host is gone if nothing
// has come from its kernel for `host_loss_s` although something would have:
//
//   - an acknowledgement of bytes that are on their way;
//   - while bytes wait for room at a process that does not read, an answer to the question for room, or a keepalive of
//     the peer's kernel. The own kernel asks for room more and more rarely, up to every two minutes, and sends no
//     keepalive beside bytes that wait; the peer's has nothing to send, so it sends one three times in `host_loss_s`.
//     They are waited for once one has come: a proxy sends none.
//
// Idle connections are the own kernel's keepalive's. Only connections for control frames are watched: they are always
// read, so that what the peer sends always arrives.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "clock.h"
#include "transport/control_link.h"

namespace sparkhvd {

class LossWatch {
 public:
  explicit LossWatch(double host_loss_s);

  /// After bytes have been written to a connection between hosts.
  void start();
  /// When to look next; kNever while nothing is on its way.
  TimePoint next() const noexcept { return next_; }
  /// A peer whose host is gone, if it is time to look.
  std::optional<Rank> look(std::span<ControlLink> links, TimePoint now);
  /// How long a host has been silent when it counts as gone, for messages.
  double limit_s() const noexcept { return limit_s_; }

 private:
  struct Heard {
    std::uint32_t segments = 0;          // at the last look
    Clock::duration silence{};           // since the last one, as seen here
    Clock::duration keepalive_period{};  // longest time until one of the peer's; 0: none has come
  };

  double limit_s_;
  TimePoint next_ = kNever;
  TimePoint last_ = {};
  std::map<Rank, Heard> heard_;
};

}  // namespace sparkhvd
