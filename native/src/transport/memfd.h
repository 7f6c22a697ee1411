// Anonymous shared memory: a sealed memfd and its mapping. The kernel frees it even if all processes are killed.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "control_groups.h"
#include "transport/fd.h"

namespace sparkhvd {

/// A mapping of shared memory. The destructor unmaps it.
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

  /// Excludes the mapping from children that are forked from now on: a child that writes there ends with a signal, and
  /// the memory does not change.
  void hide_from_children() const noexcept;

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  void unmap() noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Creates `bytes` of shared memory with a fixed size. It allocates all pages at once, so a lack of memory is an Error
/// here and not a SIGBUS later.
Fd create_memfd(std::size_t bytes);

/// Throws unless `memory` is sealed against shrinking and holds at least `bytes`.
void check_memfd(const Fd& memory, std::size_t bytes);

/// Paths of the kernel's files about limits of memory; tests pass other paths.
struct MemoryFiles {
  GroupFiles control{.v1_root = "/sys/fs/cgroup/memory"};
  std::string machine = "/proc/meminfo";
};

/// The reason why the process cannot use `reserve_bytes` of new pages and `map_bytes` of address space; std::nullopt if
/// it can. Reads RLIMIT_AS, the machine's free memory, and the limits of the process's control groups (v1 and v2).
std::optional<std::string> memory_shortage(std::size_t reserve_bytes, std::size_t map_bytes,
                                           const MemoryFiles& files = {});

}  // namespace sparkhvd
