// Detects lost hosts: if a host loses power or network, no packet reports the end of its connections.
//
// A kernel answers for its processes even if they are stopped, starved or slow. So a host is lost if nothing has
// arrived from its kernel for `host_loss_s` although an answer was due. An answer is due in two cases:
//
//   - Bytes are in flight: the peer's kernel must acknowledge them.
//   - Bytes wait here because the peer's process does not read. The peer's kernel must answer a window probe or send a
//     keepalive. The local kernel sends probes more and more rarely, up to every two minutes, and no keepalive while
//     bytes wait. The peer's kernel has nothing to send, so it sends a keepalive three times in `host_loss_s`.
//     Keepalives count as due only after the first keepalive has arrived, because a proxy does not send them.
//
// On an idle connection the local kernel's keepalive detects the loss. Only connections for control frames are watched:
// they are always read, so the peer's bytes always arrive.
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

  /// Starts watching; call it after bytes have been written to a connection between hosts.
  void start();
  /// Next time to poll; kNever while nothing is in flight.
  TimePoint next() const noexcept { return next_; }
  /// A peer with a lost host, if it is time to poll.
  std::optional<Rank> look(std::span<ControlLink> links, TimePoint now);
  /// Silence after which a host counts as lost, for messages.
  double limit_s() const noexcept { return limit_s_; }

 private:
  struct Heard {
    std::uint32_t segments = 0;          // segments received until the last poll
    Clock::duration silence{};           // time since the last segment, as seen here
    Clock::duration keepalive_period{};  // longest time before a keepalive came; 0: never came
  };

  double limit_s_;
  TimePoint next_ = kNever;
  TimePoint last_ = {};
  std::map<Rank, Heard> heard_;
};

}  // namespace sparkhvd
