#include "cpus.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <optional>

#include "text_file.h"

namespace sparkhvd {
namespace {

using CpuSet = decltype(CpuShare::allowed);

CpuSet allowed_cpus() {
  CpuSet allowed{};
  static_assert(sizeof(std::uint64_t) % sizeof(unsigned long) == 0);
  if (::sched_getaffinity(0, sizeof(allowed), reinterpret_cast<cpu_set_t*>(allowed.data())) == 0) {
    return allowed;
  }
  const auto cpus = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  for (std::size_t i = 0; i < std::min(cpus, CpuShare::kMaxCpus); ++i) {
    allowed[i / 64] |= std::uint64_t{1} << (i % 64);
  }
  return allowed;
}

/// The quota of a group in CPUs; std::nullopt for "max 100000" (v2) or "-1" (v1), which mean no quota.
std::optional<double> quota_of(const ControlGroup& group) {
  const auto text = group.is_v2 ? read_text(group.folder + "cpu.max")
                                : read_text(group.folder + "cpu.cfs_quota_us") + " " +
                                      read_text(group.folder + "cpu.cfs_period_us");
  const auto words = split(text);
  if (words.size() < 2) return std::nullopt;
  const auto quota = number_of(words[0]).value_or(0);
  const auto period = number_of(words[1]).value_or(0);
  if (quota == 0 || period == 0) return std::nullopt;
  return static_cast<double>(quota) / static_cast<double>(period);
}

/// Number that identifies a group on this host: the inode of its folder, which is equal in all mounts.
std::uint64_t identity_of(const ControlGroup& group) {
  struct stat status{};
  return ::stat(group.folder.c_str(), &status) == 0 ? status.st_ino : 0;
}

std::size_t count(const CpuSet& cpus) {
  std::size_t found = 0;
  for (const auto word : cpus) found += static_cast<std::size_t>(std::popcount(word));
  return found;
}

bool is_subset(const CpuSet& part, const CpuSet& whole) {
  return std::ranges::equal(part, whole, [](auto one, auto all) { return (one & ~all) == 0; });
}

/// True if these CPUs are enough for `threads` threads of each rank that may use no other CPUs.
bool fit_on(const CpuSet& cpus, std::span<const CpuShare> ranks, unsigned threads) {
  const auto confined = std::ranges::count_if(
      ranks, [&](const CpuShare& rank) { return is_subset(rank.allowed, cpus); });
  return static_cast<std::size_t>(confined) * threads <= count(cpus);
}

bool fit_into(const CpuShare::Quota& quota, std::span<const CpuShare> ranks, unsigned threads) {
  const auto confined = std::ranges::count_if(ranks, [&](const CpuShare& rank) {
    return std::ranges::count(rank.quotas, quota.group, &CpuShare::Quota::group) > 0;
  });
  return static_cast<double>(confined) * threads <= quota.cpus;
}

}  // namespace

CpuShare own_cpu_share(const GroupFiles& files) {
  CpuShare share;
  share.allowed = allowed_cpus();
  std::size_t found = 0;
  for (const auto& group : control_groups("cpu", files)) {
    const auto cpus = quota_of(group);
    if (cpus && found < share.quotas.size()) share.quotas[found++] = {identity_of(group), *cpus};
  }
  return share;
}

bool have_cpus(std::span<const CpuShare> ranks, unsigned threads) {
  CpuSet all{};
  for (const auto& rank : ranks) {
    std::ranges::transform(all, rank.allowed, all.begin(), std::bit_or<>());
    for (const auto& quota : rank.quotas) {
      if (quota.group != 0 && !fit_into(quota, ranks, threads)) return false;
    }
  }
  return fit_on(all, ranks, threads) && std::ranges::all_of(ranks, [&](const CpuShare& rank) {
           return fit_on(rank.allowed, ranks, threads);
         });
}

}  // namespace sparkhvd
