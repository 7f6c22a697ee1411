"""Processes of `sparkhvdrun` are killed at random moments, and no process is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.paths import ROOT
from tests.harness.processes import TAG_VARIABLE, children, find, wait_until_gone
from tests.harness.soak import amount

pytestmark = pytest.mark.soak

# Ranks that meet, communicate without end, and have a child each.
SCRIPT = """
import subprocess
from sparkhvd import launchers
from sparkhvd.engine.engine import Engine

subprocess.Popen(["sleep", "1000"])
rendezvous = launchers.find()
with Engine(rendezvous.connect(), rendezvous.settings) as engine:
    while True:
        engine.barrier().wait()
"""
RANKS = 3
# From before the launcher has read its arguments until all ranks have met.
LATEST_S = 2.0


def kinds(launcher: int, tag: str) -> dict[str, list[int]]:
    """Return the processes of a job by their kind."""
    own = children(launcher)
    ranks, guards = [], []
    for pid in own:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            (guards if b"sparkhvd-reaper" in command else ranks).append(pid)
    helpers = find("sleep", tag) - own
    return {"launcher": [launcher], "guard": guards, "rank": ranks, "helper": list(helpers)}


def test_no_process_survives_if_any_launch_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    chosen = random.Random(20)
    killed: Counter[str] = Counter()
    command = ["-m", "sparkhvd.runner.command", "-np", str(RANKS), sys.executable, str(script)]
    for number in range(amount(3, 200)):
        tag = uuid.uuid4().hex
        env = {**os.environ, "PYTHONPATH": str(ROOT), TAG_VARIABLE: tag}
        with subprocess.Popen(
            [sys.executable, *command], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as launcher:
            time.sleep(chosen.random() * LATEST_S)
            there = kinds(launcher.pid, tag)
            kind = chosen.choice([name for name in ("launcher", "rank", "guard") if there[name]])
            wanted = (
                [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
                if kind == "launcher"
                else [signal.SIGKILL]
            )
            how = chosen.choice(wanted)
            victim = chosen.choice(there[kind])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, how)
            if kind == "guard":  # ranks without a guard continue, but their launcher ends them
                time.sleep(0.2)
                launcher.terminate()
            try:
                _, errors = launcher.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                launcher.kill()
                raise
        killed[f"{kind} by {how.name}"] += 1
        left = wait_until_gone(find("", tag), 5)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        assert not left, f"{number}: {kind} {victim} by {how.name}: {commands} {errors.decode()}"
    sys.stderr.write(f"killed: {dict(killed)}\n")
