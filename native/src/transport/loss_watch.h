// Detection of lost hosts: without power or cable no packet reports the end of a connection.
//
// A kernel answers for its processes, whether they run, are stopped, starved or slow. So a host is lost if nothing has
// arrived from its kernel for `host_loss_s` although one of these was due:
//
//   - an acknowledgement of bytes in flight;
//   - while bytes wait for room at a process that does not read, an answer to a window probe, or a keepalive of the peer's
//     kernel. The local kernel probes more and more rarely, up to every two minutes, and sends no keepalive beside waiting
//     bytes. The peer's kernel has nothing to send, so it sends a keepalive three times in `host_loss_s`. Keepalives are
//     expected after the first one, because a proxy sends none.
//
// The local kernel's keepalive covers idle connections. Only connections for control frames are watched: they are always
// read, so that the peer's bytes always arrive.
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
  /// Next time to poll; kNever while nothing is in flight.
  TimePoint next() const noexcept { return next_; }
  /// A peer with a lost host, if it is time to poll.
  std::optional<Rank> look(std::span<ControlLink> links, TimePoint now);
  /// Silence after which a host counts as lost, for messages.
  double limit_s() const noexcept { return limit_s_; }

 private:
  struct Heard {
    std::uint32_t segments = 0;          // at the last poll
    Clock::duration silence{};           // since the last one, as seen here
    Clock::duration keepalive_period{};  // longest time until one of the peer's; 0: none received
  };

  double limit_s_;
  TimePoint next_ = kNever;
  TimePoint last_ = {};
  std::map<Rank, Heard> heard_;
};

}  // namespace sparkhvd
