// The Linux control groups (version 1 and version 2) of this process.
#pragma once

#include <string>
#include <vector>

namespace sparkhvd {

/// Paths of the kernel's files about the groups of one controller; tests pass other paths.
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
