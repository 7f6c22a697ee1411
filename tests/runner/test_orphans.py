"""Processes that a killed launcher leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparkhvd.runner import local_processes
from sparkhvd.runner.orphans import OrphanReaper
from sparkhvd.runner.processes import FreshProcess, ProcessExit, ProcessGroup
from tests.harness.paths import ROOT
from tests.harness.processes import is_alive, wait_until_gone

pytestmark = pytest.mark.processes

# A launcher with a process without a mark, and one that has ended and is removed. Then it waits to be killed.
LAUNCHER = """
import subprocess, sys, time
from sparkhvd.runner.orphans import OrphanReaper

reaper = OrphanReaper()
ended, kept = (subprocess.Popen(["env", "-i", "sleep", "300"], start_new_session=True) for _ in range(2))
reaper.add(ended.pid)
reaper.add(kept.pid)
reaper.remove(ended.pid)
print(ended.pid, kept.pid, reaper._reaper.pid, flush=True)
time.sleep(300)
"""


def test_process_groups_without_environment_mark_end_with_a_killed_launcher() -> None:
    """The shell /bin/sh of this machine, dash or bash, ends them."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, env=env, text=True
    ) as launcher:
        assert launcher.stdout is not None
        removed, kept, reaper = map(int, launcher.stdout.readline().split())
        launcher.kill()
    try:
        assert wait_until_gone({kept, reaper}, 10) == set()
        assert is_alive(removed)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(removed, signal.SIGKILL)


def test_stopped_reaper_does_not_block_its_launcher() -> None:
    began = time.monotonic()
    with OrphanReaper() as reaper:
        os.kill(reaper._reaper.pid, signal.SIGSTOP)
        for number in range(20_000):  # more than its pipe takes
            reaper.add(10**9 + number)
    reaper.__exit__()  # again
    reaper.remove(1)
    assert time.monotonic() - began < 10
    assert not is_alive(reaper._reaper.pid)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_process_exit_is_always_reported(is_ignored: bool) -> None:
    """This holds even if the kernel has reaped the process, or the action at its end fails."""
    ended: list[ProcessExit] = []

    def fail() -> None:
        raise ValueError("a claim that is closed already")

    handler = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        process = FreshProcess(["sh", "-c", "exit 3"])
        group = ProcessGroup(process, "", "test", 1.0)
        assert not group.join(0.0) or not ended  # before it is watched
        group.watch([], ended.append, fail)
        assert group.join(10)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [each.status for each in ended] == [None if is_ignored else 3]
    group.signal(signal.SIGKILL)  # nothing happens


def test_orphan_that_holds_the_output_delays_the_end_only_briefly(tmp_path: Path) -> None:
    script = tmp_path / "leaves.sh"
    script.write_text(f"env -i setsid sleep 31 &\ntouch {tmp_path}/ends\n")
    command = [sys.executable, "-m", "sparkhvd.runner.command", "-np", "1", "sh", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        assert subprocess.run(command, env=env, timeout=60, check=False).returncode == 0
        # The wait for output, and the end. The start is not counted: it takes seconds beside other tests.
        assert time.time() - (tmp_path / "ends").stat().st_mtime < local_processes._DRAIN_S + 3
    finally:
        subprocess.run(["pkill", "-f", "^sleep 31$"], check=False)
