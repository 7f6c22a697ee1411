"""A process loads a saved optimizer without torch's compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.paths import ROOT

pytestmark = pytest.mark.processes

LOAD = """
import sys
from types import SimpleNamespace
import torch
from sparkhvd import lazy_compiler
from sparkhvd.estimator.saving.encoding import Archive, Decoder

archive = Archive()
with lazy_compiler.installed():
    module = torch.nn.Linear(2, 1)
    given = torch.optim.Adam(module.parameters(), lr=0.5)
    module(torch.ones(1, 2)).sum().backward()
    given.step()
    values = {name: archive.encode(name, v) for name, v in {"model": module, "optimizer": given}.items()}
decoder = Decoder("/saved", SimpleNamespace(conf=SimpleNamespace(get=lambda _, default: default)), trusted=True)
decoder._tensors = archive.tensors
decoder.decode("model", values["model"])
found = decoder.decode("optimizer", values["optimizer"])
assert found.param_groups[0]["lr"] == 0.5
assert len(found.state) == 2
assert not lazy_compiler.is_loaded()
assert lazy_compiler.NAME not in sys.modules
"""


def test_optimizers_load_without_the_compiler(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
