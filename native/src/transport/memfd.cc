#include "transport/memfd.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "error.h"
#include "text_file.h"

namespace sparkhvd {
namespace {

// Unused addresses behind each mapping. Without them the kernel maps pieces contiguously, so that pieces of 256 MiB are
// 2^28 bytes apart. AMD's L1 cache finds lines by a hash of bits 12 to 27 of the address, and keeps only one of two
// lines with equal hashes. Reading and writing two such pieces at the same offsets took 2.5 times as long (4 MiB: 175
// instead of 70 us). With this gap the hashes differ for nearly every size of the pieces.
constexpr std::size_t kGap = 31 * 4096;

}  // namespace

Mapping::Mapping(const Fd& memory, std::size_t bytes, Access access) : bytes_(bytes) {
  const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address =
      ::mmap(nullptr, bytes + kGap, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw_errno("mmap of shared memory");
  data_ = static_cast<std::byte*>(address);
  // MAP_POPULATE, because page faults on a peer's memory would take about 20 times as long.
  constexpr int kFlags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
  if (::mmap(address, bytes, protection, kFlags, memory.get(), 0) == MAP_FAILED) {
    const int code = errno;
    unmap();
    errno = code;
    throw_errno("mmap of shared memory");
  }
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Mapping::~Mapping() { unmap(); }

void Mapping::hide_from_children() const noexcept {
  [[maybe_unused]] const int result = ::madvise(data_, bytes_, MADV_DONTFORK);
}

void Mapping::unmap() noexcept {
  if (data_ != nullptr) ::munmap(data_, bytes_ + kGap);
  data_ = nullptr;
}

Fd create_memfd(std::size_t bytes) {
  // Calls memfd_create by its number: glibc has the function since 2.27, and the library must load with glibc 2.17.
  Fd memory(
      static_cast<int>(::syscall(SYS_memfd_create, "sparkhvd", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!memory.valid()) throw_errno("memfd_create");
  if (const int code = ::posix_fallocate(memory.get(), 0, static_cast<off_t>(bytes)); code != 0) {
    errno = code;
    throw_errno("fallocate of " + std::to_string(bytes) + " bytes of shared memory");
  }
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_errno("sealing shared memory");
  }
  return memory;
}

void check_memfd(const Fd& memory, std::size_t bytes) {
  struct stat status{};
  if (::fstat(memory.get(), &status) != 0) throw_errno("fstat of a peer's shared memory");
  const int seals = ::fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<std::uint64_t>(status.st_size) < bytes) {
    throw Error(SPARKHVD_INTERNAL, "a peer's shared memory is not sealed or too small.");
  }
}

namespace {

/// The number in a file; std::nullopt if the file has another word ("max") or does not exist.
std::optional<std::uint64_t> read_number(const std::string& path) {
  const auto text = read_text(path);
  const auto words = split(text);
  return words.empty() ? std::nullopt : number_of(words[0]);
}

/// The number behind `word` in the file's line that starts with it, if any.
std::optional<std::uint64_t> number_behind(const std::string& path, std::string_view word) {
  const auto text = read_text(path);
  for (const auto line : split(text, "\n")) {
    const auto words = split(line);
    if (words.size() > 1 && words[0] == word) return number_of(words[1]);
  }
  return std::nullopt;
}

/// Bytes of memory that the machine can provide without swapping; std::nullopt if the file does not have the number.
std::optional<std::uint64_t> available_bytes(const std::string& path) {
  const auto kib = number_behind(path, "MemAvailable:");
  return kib ? std::optional(*kib * 1024) : std::nullopt;
}

std::optional<std::string> group_shortage(const ControlGroup& group, std::uint64_t need) {
  const std::string& folder = group.folder;
  const auto limit = read_number(folder + (group.is_v2 ? "memory.max" : "memory.limit_in_bytes"));
  auto usage = read_number(folder + (group.is_v2 ? "memory.current" : "memory.usage_in_bytes"));
  if (!limit || !usage) return std::nullopt;
  // Cached bytes of files do not count, because the kernel reclaims them before it kills a process. They fill the group
  // of any process that reads many files.
  const char* word = group.is_v2 ? "inactive_file" : "total_inactive_file";
  *usage -= std::min(*usage, number_behind(folder + "memory.stat", word).value_or(0));
  if (*usage <= *limit && *limit - *usage >= need) return std::nullopt;
  return "the control group " + folder + " allows " + std::to_string(*limit) + " bytes, of which " +
         std::to_string(*usage) + " are used";
}

}  // namespace

std::optional<std::string> memory_shortage(std::size_t reserve_bytes, std::size_t map_bytes,
                                           const MemoryFiles& files) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    const auto pages = read_number("/proc/self/statm").value_or(0);
    const std::uint64_t used = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (used > limit.rlim_cur || limit.rlim_cur - used < map_bytes) {
      return "the limit of address space (RLIMIT_AS) is " + std::to_string(limit.rlim_cur) +
             " bytes, of which " + std::to_string(used) + " are used";
    }
  }
  const auto available = available_bytes(files.machine);
  if (available && *available < reserve_bytes) {
    return "the machine has only " + std::to_string(*available) + " bytes of memory available";
  }
  for (const auto& group : control_groups("memory", files.control)) {
    if (auto shortage = group_shortage(group, reserve_bytes)) return shortage;
  }
  return std::nullopt;
}

}  // namespace sparkhvd
