"""Lightning Fabric with `strategy="sparkhvd"`: loops on two ranks give the numbers of Fabric's DDP over Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd.runner import run, run_local
from tests.harness.paths import ROOT

pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

from tests.soak.users import fabric_program as program  # noqa: E402 - after importorskip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Importing Lightning takes long on a busy machine.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
LIGHTNING, OLDER = program.PACKAGES
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "sparkhvdrun": ("-m", "sparkhvd.runner.command", "-np", "2", sys.executable),
}


def launched(launcher: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Run every loop in two processes, and return rank 0's results."""
    file = folder / f"{strategy}.json"
    command = [sys.executable, *LAUNCHERS[launcher], "-m", program.__name__, strategy, str(file)]
    ended = subprocess.run(
        [*command, *program.LOOPS], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def with_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched("torchrun", "gloo", tmp_path_factory.mktemp("gloo"))


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_same(found[name], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == (pytest.approx(wanted, abs=1e-6) if isinstance(wanted, float) else wanted)


@pytest.mark.parametrize(
    ("launcher", "strategy"), [("torchrun", "sparkhvd"), ("sparkhvdrun", "views")]
)
def test_fabric_loops_in_launched_scripts_equal_gloo(
    launcher: str, strategy: str, with_gloo: dict[str, Any], tmp_path: Path
) -> None:
    assert_same(launched(launcher, strategy, tmp_path), with_gloo)


def test_fabric_loops_in_run_on_spark_equal_gloo(
    with_gloo: dict[str, Any], spark: SparkSession
) -> None:
    names = ["classifier", "gan"]
    # Rank 0's, because the other rank has its own running statistics.
    found = run(program.results, (LIGHTNING, "sparkhvd", names), num_proc=2, spark=spark)[0]
    # Tuples of metrics are lists in the file.
    assert_same(json.loads(json.dumps(found)), {name: with_gloo[name] for name in names})


def test_lightning_fabric_package_equals_gloo(with_gloo: dict[str, Any]) -> None:
    found = run_local(program.results, (OLDER, "sparkhvd", ["gan"]), num_proc=2)[0]
    assert_same(found, {"gan": with_gloo["gan"]})


def test_fabric_refuses_arguments_that_contradict_the_job() -> None:
    (messages,) = run_local(program.refused, (LIGHTNING,), num_proc=1)
    assert len(messages) == 2
    assert messages[0].startswith(
        "Fabric(devices=4, num_nodes=1, strategy='sparkhvd'): this process is a job of one rank"
    )
    assert messages[1].startswith("FabricStrategy(process_group_backend=...): the job has")
