"""Gradients of a GPU come on a thread of autograd's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("fake_gpus")
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends made in Python",
)
def test_reentrant_checkpoints_on_a_thread_of_autograds_own() -> None:
    command = [sys.executable, "-m", "tests.harness.autograd_threads"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split() == ["equal"]
