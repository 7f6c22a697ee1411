// The end of an engine's connections: they stay open until their last bytes have reached the peers' hosts.
//
// A stopped or starved peer may need long to make room. An earlier close could destroy unread bytes: tensors, the goodbye
// or the cause of a failure. Waiting in `shutdown` would delay a program that joins another job. So connections that
// remain after a moment move to a background thread, for at most a second.
#pragma once

#include <vector>

#include "clock.h"
#include "transport/control_link.h"
#include "transport/data_link.h"

namespace sparkhvd {

class GracefulClose {
 public:
  GracefulClose(std::vector<ControlLink> links, std::vector<DataLink> data_links);

  /// Closes delivered connections, for a moment here and then in the background.
  static void say(GracefulClose graceful_close);
  /// Waits for closes in the background, before the process ends.
  static void finish();

 private:
  bool close_delivered();
  bool close_until(TimePoint deadline);

  std::vector<ControlLink> links_;
  std::vector<DataLink> data_links_;
};

}  // namespace sparkhvd
