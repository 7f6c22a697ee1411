// Limits of memory from control groups (version 1 and version 2).
#include "transport/memfd.h"

#include "folder.h"
#include "test.h"

namespace sparkhvd::test::memfd_test {
namespace {

std::optional<std::string> shortage(const Folder& folder, std::size_t bytes) {
  return memory_shortage(bytes, 0, {folder.control(), folder.at("machine")});
}

TEST(memory_shortage_reads_version_2_and_the_groups_above) {
  const Folder folder;
  folder.write("groups", "0::/a/b\n");
  folder.write("v2/a/b/memory.max", "max\n");
  folder.write("v2/a/b/memory.current", "700\n");
  CHECK(!shortage(folder, 1 << 30));
  folder.write("v2/a/memory.max", "1000\n");
  folder.write("v2/a/memory.current", "900\n");
  CHECK(!shortage(folder, 100));
  const auto found = shortage(folder, 101);
  CHECK(found.has_value());
  CHECK_MESSAGE(found->ends_with("/v2/a/ allows 1000 bytes, of which 900 are used"), *found);
}

TEST(memory_shortage_does_not_count_cached_files) {
  const Folder folder;
  folder.write("groups", "0::/\n");
  folder.write("v2/memory.max", "1000\n");
  folder.write("v2/memory.current", "990\n");
  folder.write("v2/memory.stat", "anon 90\ninactive_file 900\nactive_file 0\n");
  CHECK(!shortage(folder, 910));
  CHECK(shortage(folder, 911).has_value());
}

TEST(memory_shortage_reads_version_1) {
  const Folder folder;
  folder.write("groups", "5:cpu:/x\n4:memory,hugetlb:/docker/1\n");
  // In a container the path may not exist below the mount.
  folder.write("v1/memory.limit_in_bytes", "1000\n");
  folder.write("v1/memory.usage_in_bytes", "600\n");
  folder.write("v1/memory.stat", "total_inactive_file 100\n");
  CHECK(!shortage(folder, 500));
  CHECK(shortage(folder, 501).has_value());
}

TEST(memory_shortage_asks_what_the_machine_has_left) {
  const Folder folder;
  folder.write("machine", "MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:  100 kB\n");
  CHECK(!shortage(folder, 100 * 1024));
  const auto found = shortage(folder, 100 * 1024 + 1);
  CHECK(found.has_value());
  CHECK_EQUAL(*found, "the machine has only 102400 bytes of memory available");
}

TEST(memory_shortage_knows_nothing_without_the_files) {
  const Folder folder;
  CHECK(!shortage(folder, std::size_t{1} << 50));
}

}  // namespace
}  // namespace sparkhvd::test::memfd_test
