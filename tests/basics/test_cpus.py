"""CPUs that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkhvd import cpus
from sparkhvd.cpus import cgroup_quota

pytestmark = pytest.mark.pure


def test_cgroup_v2_quota_includes_limits_of_parent_groups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path, own) is None
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    assert cgroup_quota(tmp_path, own) == 1.5


def test_cgroup_v1_quota_is_read(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,cpuacct:/a\n")
    (tmp_path / "cpu" / "a").mkdir(parents=True)
    (tmp_path / "cpu" / "a" / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cpu" / "a" / "cpu.cfs_quota_us").write_text("-1")
    assert cgroup_quota(tmp_path, own) is None
    (tmp_path / "cpu" / "a" / "cpu.cfs_quota_us").write_text("200000")
    assert cgroup_quota(tmp_path, own) == 2.0


@pytest.mark.parametrize(
    ("quota", "allowed", "whole"), [(None, 1, 1), (0.2, 0.2, 1), (1.5, 1, 1), (8.0, 1, 1)]
)
def test_allowed_cpus_are_the_lesser_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, allowed: float, whole: int
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(cpus, "cgroup_quota", lambda: quota)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert (cpus.allowed(), cpus.jvm_processors()) == (allowed, whole)
    finally:
        os.sched_setaffinity(0, before)


def test_jvm_gets_fractional_processor_count_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "allowed", lambda: 1.5)
    assert cpus.jvm_processors() == 2
