// Closes an engine's connections after their last bytes have reached the peers' hosts.
//
// A stopped or starved peer may take long to read. Closing a connection earlier could destroy unread bytes: tensors,
// the goodbye or the cause of a failure. Waiting in `shutdown` would delay a program that joins another job. So after a
// moment a background thread takes over the remaining connections, for at most a second.
#pragma once

#include <vector>

#include "clock.h"
#include "transport/control_link.h"
#include "transport/data_link.h"

namespace sparkhvd {

class GracefulClose {
 public:
  GracefulClose(std::vector<ControlLink> links, std::vector<DataLink> data_links);

  /// Closes each connection when its bytes are delivered, first in the caller's thread and then in the background.
  static void say(GracefulClose graceful_close);
  /// Waits until the background threads have closed their connections. Call it before the process ends.
  static void finish();

 private:
  bool close_delivered();
  bool close_until(TimePoint deadline);

  std::vector<ControlLink> links_;
  std::vector<DataLink> data_links_;
};

}  // namespace sparkhvd
