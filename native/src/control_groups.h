// The control groups of this process, of both versions.
#pragma once

#include <string>
#include <vector>

namespace sparkhvd {

/// The kernel's files on the groups of one controller; a test passes its own.
struct GroupFiles {
  std::string groups = "/proc/self/cgroup";
  std::string v2_root = "/sys/fs/cgroup";
  std::string v1_root;  // of the controller
};

struct ControlGroup {
  bool is_v2 = false;
  std::string folder;  // ends with a slash
};

/// The process's own groups under `controller` ("memory", "cpu"), each followed by its ancestors, because
/// any of them may have a limit.
std::vector<ControlGroup> control_groups(const std::string& controller, const GroupFiles& files);

}  // namespace sparkhvd
