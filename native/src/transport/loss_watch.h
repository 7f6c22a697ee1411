// Hosts that have vanished: without power or cable nobody says that a connection is over.
//
// A kernel answers for its processes, whether they run, are stopped, starved or behind. So a host is
// gone if bytes on their way to it have had no answer for `host_loss_s`. The idle connections are the
// kernel's keepalive's. Only connections for control frames are watched: they are always read.
#pragma once

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
  double limit_s_;
  TimePoint next_ = kNever;
  TimePoint last_ = {};
  std::map<Rank, Clock::duration> silence_;  // without an answer, as seen here
};

}  // namespace sparkhvd
