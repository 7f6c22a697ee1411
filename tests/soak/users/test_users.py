"""Unmodified Lightning, Accelerate and Hugging Face's Trainer on this backend, in an environment that has them (`make test-users`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd.runner import run
from tests.harness.paths import ROOT

pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

from tests.soak.users import program  # noqa: E402 - after importorskip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Importing them takes long on a busy machine.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def by_torchrun(backend: str, folder: Path, *users: str) -> Any:
    """Run the trainings in two processes of torchrun, and return rank 0's results."""
    file = folder / f"{backend}.json"
    command = [*TORCHRUN, "-m", program.__name__, backend, str(file), *users]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def with_gloo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results over Gloo. A sum of two ranks is rounded once, so the engine's results must be the same numbers."""
    folder, found = tmp_path_factory.mktemp("gloo"), {}
    for (
        user
    ) in program.USERS:  # a start for each: Gloo does not meet twice through torchrun's store
        found |= by_torchrun("gloo", folder, user)
    assert [each.pop("backend") for each in found.values()] == ["gloo"] * len(found)
    return found


def assert_same(found: Any, with_gloo: Any) -> None:
    assert [each.pop("backend") for each in found.values()] == ["sparkhvd"] * len(found)
    assert found == with_gloo


def test_user_programs_under_torchrun_equal_gloo(with_gloo: Any, tmp_path: Path) -> None:
    assert_same(by_torchrun("sparkhvd", tmp_path, *program.USERS), with_gloo)


def test_user_programs_in_run_on_spark_equal_gloo(with_gloo: Any, spark: SparkSession) -> None:
    for (
        user
    ) in program.USERS:  # a start for each: Lightning's end takes WORLD_SIZE out of the environment
        found = run(program.results, args=("sparkhvd", [user]), num_proc=2, spark=spark)
        assert_same(found[0], {user: with_gloo[user]})
        assert found[1][user]["numbers"] == found[0][user]["numbers"]
