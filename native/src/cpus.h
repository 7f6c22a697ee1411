// CPUs that the ranks of a host may use: affinity, and quotas of control groups.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "control_groups.h"

namespace sparkhvd {

/// CPUs that a process may use. Ranks exchange it in shared memory, where all values start as zero.
struct CpuShare {
  static constexpr std::size_t kMaxCpus = 8192;  // the largest number that a Linux kernel supports
  static constexpr std::size_t kMaxQuotas = 16;

  /// CPU time that all processes of a control group may use together, as a number of CPUs.
  struct Quota {
    std::uint64_t group = 0;  // equal for all processes of the group, in any container; 0: no quota
    double cpus = 0;
  };

  std::array<std::uint64_t, kMaxCpus / 64> allowed{};  // a bit per CPU
  std::array<Quota, kMaxQuotas> quotas{};
};

/// The CPUs that the calling thread may use.
CpuShare own_cpu_share(const GroupFiles& files = {.v1_root = "/sys/fs/cgroup/cpu"});

/// True if `threads` threads of every rank of a host can run at the same time: no set of CPUs and no quota is smaller
/// than the number of threads that it confines.
bool have_cpus(std::span<const CpuShare> ranks, unsigned threads);

}  // namespace sparkhvd
