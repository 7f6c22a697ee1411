"""Runs the conformity program of native/tests as tests of its functions do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "build" / "native"
# Loading a library of 200 MB from a cold disk takes seconds; a hang is stopped here.
TIMEOUT_S = 60


def conformity(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program's end. It sees no GPU, not even on a machine that has one."""
    program = NATIVE / "nccl_conformity"
    if not program.exists():
        pytest.skip("build/native has no nccl_conformity: make test-native builds it")
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )
