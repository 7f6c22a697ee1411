// The control groups that hold this process, of both versions.
#pragma once

#include <string>
#include <vector>

namespace sparkhvd {

/// Where the kernel tells of the groups of one controller; a test gives its own.
struct GroupFiles {
  std::string groups = "/proc/self/cgroup";
  std::string v2_root = "/sys/fs/cgroup";
  std::string v1_root;  // of the controller
};

struct ControlGroup {
  bool is_v2 = false;
  std::string folder;  // ends with a slash
};

/// The process's own groups under `controller` ("memory", "cpu"), each followed by those above it:
/// a limit may sit on any of them.
std::vector<ControlGroup> control_groups(const std::string& controller, const GroupFiles& files);

}  // namespace sparkhvd
