"""Each of PyTorch's own backend tests that passes on Gloo also passes on our backend."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.paths import ROOT
from tests.soak.distributed import torchs_tests

VERSION = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
# PyTorch before 2.14 asks for the name "gloo" before it calls the group.
OF_GLOO_ALONE = {"test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def outcomes(backend: str, folder: Path, *names: str) -> dict[str, str]:
    file = folder / f"{backend}.json"
    command = [sys.executable, "-m", torchs_tests.__name__, backend, str(file), *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, str] = json.loads(file.read_text())
    return found


def test_torch_tests_that_pass_on_gloo_pass_on_this_backend(tmp_path: Path) -> None:
    passed = [n for n, how in outcomes("gloo", tmp_path).items() if how == "passed"]
    assert len(passed) > 80
    ours = outcomes("sparkhvd", tmp_path, *passed)
    wanted = set(passed) - (OF_GLOO_ALONE if VERSION < (2, 14) else set())
    failed = {name: ours[name] for name in sorted(wanted) if ours[name] != "passed"}
    print(
        f"torch {torch.__version__}: {len(wanted) - len(failed)} of {len(passed)} that pass on Gloo"
    )
    assert failed == {}
