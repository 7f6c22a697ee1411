"""Processes started without a launcher find each other through torch's store, and notice lost ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.paths import ROOT
from tests.harness.soak import soak

pytestmark = pytest.mark.processes


def test_ranks_of_a_file_store_detect_a_death_in_backward(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.distributed.script", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    met = "sum 2.0 hvd 2\nagain 2.0\nthen 4.0\nsame store 16.0\n"
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert texts == [f"{met}lost True True True\nnew group 1\n", met]
    assert ended.stdout == "0 -9\n", ended.stderr


@soak("a death in backward, here; a stopped rank: engine/test_faults")
def test_ctrl_c_or_a_stopped_rank_ends_backward_under_torchrun(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "tests.distributed.script"),
    ]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    said = ["interrupted True", "resumed True", "timeout True True True"]
    assert sorted(ended.stdout.splitlines()) == said, ended.stderr
    assert not list(tmp_path.glob("sparkhvd-*"))
