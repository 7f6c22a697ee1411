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
  static constexpr std::size_t kMaxCpus = 8192;  // as many as a kernel can have
  static constexpr std::size_t kMaxQuotas = 16;

  /// Processors' worth of time that all processes of a control group may use together.
  struct Quota {
    std::uint64_t group = 0;  // equal for all processes of the group, in any container; 0: none
    double cpus = 0;
  };

  std::array<std::uint64_t, kMaxCpus / 64> allowed{};  // a bit per CPU
  std::array<Quota, kMaxQuotas> quotas{};
};

/// The calling thread's.
CpuShare own_cpu_share(const GroupFiles& files = {.v1_root = "/sys/fs/cgroup/cpu"});

/// True if `threads` of every rank of a host can run at the same time: no ranks are confined to fewer CPUs than
/// threads, nor to a smaller quota.
bool have_cpus(std::span<const CpuShare> ranks, unsigned threads);

}  // namespace sparkhvd
