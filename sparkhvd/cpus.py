"""CPUs of a process, by its affinity and control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path


def allowed() -> float:
    """Count the CPUs of this process by affinity and quota. The result may be a fraction."""
    quota = cgroup_quota()
    return affinity() if quota is None else min(affinity(), quota)


def jvm_processors() -> int:
    """Number of CPUs as a JVM in this process counts them: fractions are rounded up."""
    return max(1, math.ceil(allowed()))


def affinity() -> int:
    """Count the CPUs in the affinity mask, or all CPUs on a system without affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_quota(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Read the CPU quota of this process's control group, such as 1.5, or None if unlimited."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    quotas = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if not controllers:  # cgroup version 2; limits of parent groups count, too
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                quotas.append(_quota(read_text(folder / "cpu.max").split()))
                if folder == root:
                    break
        elif "cpu" in controllers.split(","):
            for folder in (root / "cpu" / path.lstrip("/"), root / "cpu"):
                quota, period = (
                    read_text(folder / "cpu.cfs_quota_us"),
                    read_text(folder / "cpu.cfs_period_us"),
                )
                quotas.append(_quota([quota, period]))
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def _quota(words: Sequence[str]) -> float | None:
    """Parse quota and period in microseconds, as the kernel writes them, or return None if unlimited ("max", "-1" or empty)."""
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def read_text(path: Path) -> str:
    """Read and strip the text of a file, or return "" if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
