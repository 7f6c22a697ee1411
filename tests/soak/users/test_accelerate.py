"""Test scripts of Accelerate's wheel on this backend: each function that passes over Gloo passes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.paths import ROOT

pytestmark = pytest.mark.soak

pytest.importorskip("accelerate", reason="runs where accelerate is: make test-users")

SCRIPTS = (
    "test_script",
    "test_ops",
    "test_sync",
    "test_distributed_data_loop",
    "test_ddp_comm_hook",
)
RANKS = 2


def outcomes(script: str, backend: str, folder: Path) -> dict[str, list[str]]:
    """Return the outcome of each function of the script, on each rank."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    program = ("-m", "tests.soak.users.accelerate_program", backend, str(folder), script)
    ended = subprocess.run(
        [*launcher, f"--nproc-per-node={RANKS}", *program],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert list(ranks[0]) == list(ranks[1])
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def last_lines(ends: list[str]) -> list[str]:
    return [end.strip().splitlines()[-1] for end in ends]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS)
def test_accelerate_tests_that_pass_over_gloo_pass_on_this_backend(
    script: str, tmp_path: Path
) -> None:
    gloo, ours = (outcomes(script, backend, tmp_path) for backend in ("gloo", "sparkhvd"))
    assert list(gloo) == list(ours)
    passed, own = (
        {name for name, ends in found.items() if set(ends) == {"passed"}} for found in (gloo, ours)
    )
    print(f"{script}: {len(passed)} of {len(gloo)} pass over Gloo, {len(own)} of {len(ours)} here")
    for name in gloo.keys() - (passed & own):
        print(f"  {name}\n    Gloo: {last_lines(gloo[name])}\n    here: {last_lines(ours[name])}")
    assert passed
    assert not passed - own
