#include "control_groups.h"

#include "text_file.h"

namespace sparkhvd {
namespace {

/// Adds the group at `path` and all of its ancestors.
void add_groups(std::vector<ControlGroup>& found, bool is_v2, const std::string& root,
                std::string path) {
  while (true) {
    found.push_back({is_v2, root + (path == "/" ? "" : path) + "/"});
    const auto slash = path.rfind('/');
    if (path.empty() || path == "/" || slash == std::string::npos) return;
    path = slash == 0 ? "/" : path.substr(0, slash);
  }
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& controller, const GroupFiles& files) {
  std::vector<ControlGroup> found;
  // Lines are "0::/path" (v2) or "4:memory,cpu:/path" (v1). In a container the path may not exist below the mount. The
  // root of the mount is then the container's own group.
  const auto groups = read_text(files.groups);
  for (const auto text : split(groups, "\n")) {
    const std::string line(text);
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = ",";
    controllers.append(line, first + 1, second - first - 1).append(",");
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      add_groups(found, true, files.v2_root, path);
    } else if (controllers.find("," + controller + ",") != std::string::npos) {
      add_groups(found, false, files.v1_root, path);
    }
  }
  return found;
}

}  // namespace sparkhvd
