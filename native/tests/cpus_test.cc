// CPUs that a host's ranks may use: affinity, and quotas of control groups (version 1 and version 2).
#include "cpus.h"

#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "communicator.h"
#include "folder.h"
#include "test.h"

namespace sparkhvd::test::cpus_test {
namespace {

CpuShare on(std::initializer_list<std::size_t> cpus) {
  CpuShare share;
  for (const auto cpu : cpus) share.allowed[cpu / 64] |= std::uint64_t{1} << (cpu % 64);
  return share;
}

CpuShare on_64(std::initializer_list<CpuShare::Quota> quotas = {}) {
  CpuShare share;
  share.allowed[0] = UINT64_MAX;
  std::ranges::copy(quotas, share.quotas.begin());
  return share;
}

bool have(const std::vector<CpuShare>& ranks, unsigned threads = 1) {
  return have_cpus(ranks, threads);
}

TEST(cpus_of_ranks_that_may_run_anywhere) {
  CHECK(have({on({0, 1})}));
  CHECK(have({on({0, 1}), on({0, 1})}));
  CHECK(!have({on({0, 1}), on({0, 1}), on({0, 1})}));
  CHECK(have(std::vector(64, on_64())));
  CHECK(!have(std::vector(65, on_64())));
}

TEST(cpus_of_ranks_that_are_pinned) {
  CHECK(!have({on({0}), on({0})}));
  CHECK(have({on({0}), on({1}), on({8191})}));
  // Two of three ranks have only one CPU, however many CPUs the third rank may use.
  CHECK(!have({on({5}), on({5}), on({0, 1, 2, 3})}));
  // A rank that may use both CPUs leaves CPU 0 to the rank that may use only CPU 0.
  CHECK(have({on({0}), on({0, 1})}));
  CHECK(!have({on({0}), on({0, 1}), on({0, 1})}));
  // Overlapping sets: three ranks on three CPUs.
  CHECK(have({on({0, 1}), on({1, 2}), on({0, 2})}));
  CHECK(!have({on({0, 1}), on({1, 2}), on({0, 2}), on({0, 2})}));
}

TEST(cpus_of_ranks_with_a_quota) {
  const CpuShare in_one{on_64({{7, 1.0}})};
  CHECK(have({in_one}));
  CHECK(!have({in_one, in_one}));
  // Each rank is in a separate container.
  CHECK(have({in_one, on_64({{8, 1.0}}), on_64({{9, 1.5}})}));
  CHECK(!have({on_64({{8, 0.5}})}));
  // Both ranks are in the same parent group.
  CHECK(have({on_64({{7, 1.0}, {3, 2.0}}), on_64({{8, 1.0}, {3, 2.0}})}));
  CHECK(!have({on_64({{7, 1.0}, {3, 1.9}}), on_64({{8, 1.0}, {3, 1.9}})}));
}

TEST(cpus_for_two_threads_of_every_rank) {
  CHECK(have({on({0, 1}), on({2, 3})}, 2));
  CHECK(!have({on({0, 1}), on({1, 2})}, 2));
  CHECK(!have({on({0, 1}), on({2})}, 2));
  CHECK(!have({on_64({{7, 3.0}}), on_64({{7, 3.0}})}, 2));
}

/// Runs `body` in a thread that may use one CPU only.
template <class Body>
std::thread pinned(std::size_t cpu, Body body) {
  return std::thread([cpu, body = std::move(body)] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK(::sched_setaffinity(0, sizeof(one), &one) == 0);
    body();
  });
}

/// The CPUs that this process may use, at most two.
std::vector<std::size_t> two_cpus() {
  cpu_set_t all;
  CHECK(::sched_getaffinity(0, sizeof(all), &all) == 0);
  std::vector<std::size_t> found;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE && found.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &all)) found.push_back(cpu);
  }
  return found;
}

TEST(cpus_are_those_of_the_affinity) {
  pinned(two_cpus().front(), [] {
    const CpuShare mine = own_cpu_share();
    CHECK(have({mine}));
    CHECK(!have({mine, mine}));
  }).join();
}

/// Pins two ranks to these CPUs. Returns, by rank, whether it finds that both ranks have a CPU.
std::array<bool, 2> ranks_have_cpus(std::array<std::size_t, 2> cpus) {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  std::array<bool, 2> found{};
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.push_back(pinned(cpus[rank], [rank, &pair, &found] {
      WakeupEvent wakeup;
      std::vector<std::string> warnings;
      std::vector<Fd> sockets(2);
      sockets[1 - rank] = Fd(pair[rank]);
      const World world({.membership = {Rank{static_cast<std::int32_t>(rank)}, {0, 0}},
                         .slot_bytes = 4096,
                         .slots = 2,
                         .connect_timeout_s = 20},
                        std::move(sockets), wakeup, warnings);
      found[rank] = have_cpus(world.cpu_shares(), 1);
    }));
  }
  for (auto& thread : threads) thread.join();
  return found;
}

TEST(cpus_of_the_other_ranks_of_a_host_are_known) {
  const auto cpus = two_cpus();
  const std::array both{true, true};
  const std::array neither{false, false};
  CHECK(ranks_have_cpus({cpus[0], cpus[0]}) == neither);
  if (cpus.size() == 2) CHECK(ranks_have_cpus({cpus[0], cpus[1]}) == both);
}

TEST(cpus_of_groups_of_version_2_and_those_above) {
  const Folder folder;
  folder.write("groups", "0::/a/b\n");
  folder.write("v2/a/b/cpu.max", "max 100000\n");
  folder.write("v2/a/cpu.max", "150000 100000\n");
  folder.write("v2/cpu.max", "200000 100000\n");
  const CpuShare share = own_cpu_share(folder.control());
  CHECK_EQUAL(share.quotas[0].cpus, 1.5);
  CHECK_EQUAL(share.quotas[1].cpus, 2.0);
  CHECK_EQUAL(share.quotas[2].group, std::uint64_t{0});
  CHECK(share.quotas[0].group != share.quotas[1].group);
  CHECK(share.quotas[0].group != 0);
}

TEST(cpus_of_groups_of_version_1) {
  const Folder folder;
  // In a container the path may not exist below the mount.
  folder.write("groups", "5:memory:/x\n4:cpu,cpuacct:/docker/1\n");
  folder.write("v1/cpu.cfs_quota_us", "50000\n");
  folder.write("v1/cpu.cfs_period_us", "100000\n");
  CHECK_EQUAL(own_cpu_share(folder.control()).quotas[0].cpus, 0.5);
  folder.write("v1/cpu.cfs_quota_us", "-1\n");
  CHECK_EQUAL(own_cpu_share(folder.control()).quotas[0].group, std::uint64_t{0});
}

TEST(cpus_without_control_groups) {
  const Folder folder;
  CHECK_EQUAL(own_cpu_share(folder.control()).quotas[0].group, std::uint64_t{0});
}

}  // namespace
}  // namespace sparkhvd::test::cpus_test
