// Anonymous shared memory: a sealed memfd and its mapping. Nothing remains after a kill.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "control_groups.h"
#include "transport/fd.h"

namespace sparkhvd {

/// One mapping of shared memory; unmapped on destruction.
class Mapping {
 public:
  enum class Access { kReadOnly, kReadWrite };

  Mapping() noexcept = default;
  Mapping(const Fd& memory, std::size_t bytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  /// Excludes it from processes forked from now on: a write there ends them with a signal, without effect on
  /// other processes.
  void hide_from_children() const noexcept;

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  void unmap() noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Creates `bytes` of memory whose pages exist already (a full machine is an error here, not a
/// SIGBUS later) and whose size can never change.
Fd create_memfd(std::size_t bytes);

/// Throws unless `memory` is sealed against shrinking and holds at least `bytes`.
void check_memfd(const Fd& memory, std::size_t bytes);

/// The kernel's files on the limits of memory; a test passes its own.
struct MemoryFiles {
  GroupFiles control{.v1_root = "/sys/fs/cgroup/memory"};
  std::string machine = "/proc/meminfo";
};

/// Why `reserve_bytes` of new pages and `map_bytes` of address space should not be used; nothing if they
/// may. Reads RLIMIT_AS, the machine's free memory, and the limits of the process's control group (v1 and v2).
std::optional<std::string> memory_shortage(std::size_t reserve_bytes, std::size_t map_bytes,
                                           const MemoryFiles& files = {});

}  // namespace sparkhvd
