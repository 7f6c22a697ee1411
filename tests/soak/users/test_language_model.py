"""examples/recipes/language_model.py: Hugging Face's Trainer and TRL's SFTTrainer on this backend give Gloo's losses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.paths import ROOT

pytest.importorskip("trl", reason="runs where trl is: make test-users")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
RECIPE = str(ROOT / "examples" / "recipes" / "language_model.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SPARKHVDRUN = ("-m", "sparkhvd.runner.command", "-np", "2", sys.executable)
FINDS_BACKENDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which torch finds the backend as in an installed package. The test environment may be older than its entry point."""
    facts = tmp_path_factory.mktemp("installed") / "named-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 0\n")
    named = re.search(
        r'"torch.distributed.backends"\]\n(sparkhvd = ".*")', (ROOT / "pyproject.toml").read_text()
    )
    assert named
    (facts / "entry_points.txt").write_text(
        f"[torch.distributed.backends]\n{named[1].replace(chr(34), '')}\n"
    )
    path = os.pathsep.join([str(facts.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def losses(
    launcher: tuple[str, ...], backend: str, environment: dict[str, str], *options: str
) -> list[float]:
    """Run the recipe in two processes, and return the loss before and after the training."""
    ended = subprocess.run(
        [sys.executable, *launcher, RECIPE, "--backend", backend, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    found = re.search(rf"2 ranks over {backend}: loss (\S+), after training (\S+)", ended.stdout)
    assert found, (ended.stdout + ended.stderr)[-4000:]
    return [float(each) for each in found.groups()]


@pytest.mark.parametrize(
    ("launcher", "options", "part"),
    [(TORCHRUN, [], 0.5), (SPARKHVDRUN, ["--sft"], 0.92)],  # the head is frozen under adapters
    ids=["trainer", "sft"],
)
def test_language_model_training_has_the_losses_of_gloo(
    launcher: tuple[str, ...], options: list[str], part: float, environment: dict[str, str]
) -> None:
    before, after = losses(launcher, "sparkhvd", environment, *options)
    assert after < part * before
    assert losses(TORCHRUN, "gloo", environment, *options) == pytest.approx(
        [before, after], abs=1e-4
    )


@pytest.mark.skipif(not FINDS_BACKENDS, reason="torch looks for backends since 2.14")
def test_torch_finds_the_sparkhvd_backend_without_an_import(
    environment: dict[str, str], tmp_path: Path
) -> None:
    program = (
        "import sys, torch.distributed as dist; "
        "dist.init_process_group('sparkhvd', store=dist.HashStore(), rank=0, world_size=1); "
        "assert dist.get_backend() == 'sparkhvd' and 'sparkhvd.distributed' in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=200
    )
