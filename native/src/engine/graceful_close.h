// The end of an engine's connections: they stay until their last bytes have reached the peers' hosts.
//
// A peer whose process is stopped, or starved, may need long to make room. Closing earlier could destroy what it has not
// read, be it tensors, the goodbye or the cause of a failure; waiting in `shutdown` would keep a program that has others to
// meet. So what is left after a moment goes to a thread of its own, for at most a second.
#pragma once

#include <vector>

#include "clock.h"
#include "transport/control_link.h"
#include "transport/data_link.h"

namespace sparkhvd {

class GracefulClose {
 public:
  GracefulClose(std::vector<ControlLink> links, std::vector<DataLink> data_links);

  /// Closes what is delivered, for a moment here and then in the background.
  static void say(GracefulClose graceful_close);
  /// Waits for those in the background, before the process ends.
  static void finish();

 private:
  bool close_delivered();
  bool close_until(TimePoint deadline);

  std::vector<ControlLink> links_;
  std::vector<DataLink> data_links_;
};

}  // namespace sparkhvd
