"""Run the conformity program of native/tests from tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.paths import ROOT

NATIVE = ROOT / "build" / "native"
# Loading a library of 200 MB from a cold disk takes seconds; a hang is stopped here.
TIMEOUT_S = 60


def conformity(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end. It sees no GPU, even on a machine with one."""
    return subprocess.run(
        [_program(), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


@contextlib.contextmanager
def started(
    *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start the program. Yield it and the processes of its two ranks, which are in an operation."""
    program = subprocess.Popen(
        [_program(), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        deadline = time.monotonic() + TIMEOUT_S
        while len(ranks := [int(pid) for pid in children.read_text().split()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)
        yield program, ranks
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def _program() -> Path:
    program = NATIVE / "nccl_conformity"
    if not program.exists():
        pytest.skip("build/native has no nccl_conformity: make stand-in builds it")
    return program
