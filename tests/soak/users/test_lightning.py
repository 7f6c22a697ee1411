"""Lightning with `strategy="sparkhvd"`: each training on 2 and on 3 ranks equals one process with the whole batch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkhvd.errors import RankError
from sparkhvd.runner import run, run_local
from tests.harness.netns import two_hosts, why_not
from tests.harness.paths import ROOT
from tests.harness.ranks_on_hosts import ranks_on

pytest.importorskip("lightning", reason="runs where lightning is: make test-users")

from tests.soak.users import lightning_program as program  # noqa: E402 - after importorskip

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Importing Lightning takes long on a busy machine.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
LIGHTNING, OTHER = program.PACKAGES
# Sums of three ranks' gradients are rounded differently from sums of one batch, most of all in half precision.
ROUNDING, OF_CASE = 2e-5, {"mixed": 0.03, "double": 1e-12}


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_local(program.results, (LIGHTNING, list(program.CASES)), num_proc=1)[0]


def assert_same(found: dict[str, Any], alone: dict[str, Any]) -> None:
    for case, values in found.items():
        for key, value in values.items():
            wanted = alone[case][key]
            if isinstance(value, list) and isinstance(value[0], float):
                wanted = pytest.approx(wanted, abs=OF_CASE.get(case, ROUNDING))
            assert value == wanted, f"{case}: {key}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_lightning_training_equals_one_process(alone: Any, ranks: int) -> None:
    for found in run_local(program.results, (LIGHTNING, list(program.CASES)), num_proc=ranks):
        assert_same(found, alone)
        assert_same({"whole": {"numbers": found["goes_on"]["whole"]}}, {"whole": found["goes_on"]})


def test_other_lightning_package_equals_one_process(alone: Any) -> None:
    for found in run_local(program.results, (OTHER, ["everything", "manual"]), num_proc=2):
        assert_same(found, alone)


def test_lightning_module_collectives_and_logs_work_over_the_strategy() -> None:
    ranks = run_local(program.results, (LIGHTNING, ["collectives"]), num_proc=3)
    for rank, found in enumerate(ranks):
        assert found["collectives"] == {
            "gathered": [1.0, 2.0, 3.0],
            "broadcast": {"rank": 0},
            "last": 2,
            "votes": [False, True],
            # Lightning sums what was logged over the steps, too.
            "logged": [2.0, 6.0 * program.ROWS / program.BATCH, 3.0, 1.0],
            "sampler": [rank, 3, True],  # Lightning's in training
            "ranks": [rank, 0, 3],
        }


def test_frozen_parameters_are_sent_only_to_ranks_that_differ(tmp_path: Path) -> None:
    for found in run_local(program.frozen, (LIGHTNING, str(tmp_path)), num_proc=2):
        (same, _), (other, total) = found
        assert same < 100_000
        assert other > 4_000_000
        assert total == 0.0


LAUNCHERS = {
    "sparkhvdrun": [sys.executable, "-m", "sparkhvd.runner.command", "-np", "2", sys.executable],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    ],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    "nothing": [sys.executable],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lightning_ranks_of_every_launcher_equal_one_process(
    launcher: str, alone: Any, tmp_path: Path
) -> None:
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip("mpirun (openmpi-bin) is not installed")
    file = tmp_path / "found.json"
    command = [*LAUNCHERS[launcher], "-m", program.__name__, str(file), "everything", "double"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert_same(json.loads(file.read_text()), alone)


def test_lightning_in_run_on_spark_equals_one_process(alone: Any, spark: SparkSession) -> None:
    for found in run(program.results, args=(LIGHTNING, ["everything"]), num_proc=2, spark=spark):
        assert_same(found, alone)


def test_lightning_on_two_hosts_equals_one_process(alone: Any) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts on one machine: {reason}")
    with (
        two_hosts() as hosts,
        ranks_on(hosts, f"{program.__name__}:on_host", with_engine=False) as ranks,
    ):
        for rank in ranks:
            assert_same({"double": {"numbers": rank.expect(300)}}, alone)


def test_exception_caught_on_one_rank_ends_the_others_immediately(tmp_path: Path) -> None:
    found = run_local(program.fails, (LIGHTNING, "swallowed", str(tmp_path)), num_proc=2)
    kind, seconds, message = found[0].split(" ", 2)
    assert (kind, found[1]) == ("PeerLostError", "no error")
    assert message.endswith("rank 1 aborted: ValueError: the third step")
    assert float(seconds) < 5


def test_driver_raises_the_original_exception_rather_than_its_consequences(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Rank 1 of 2 .* raised ValueError: the third step"):
        run_local(program.fails, (LIGHTNING, "raised", str(tmp_path)), num_proc=2)


def test_killed_rank_is_named_on_the_others_and_on_the_driver(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Rank 1 of 2 .* ended with signal SIGKILL"):
        run_local(program.fails, (LIGHTNING, "killed", str(tmp_path)), num_proc=2)
    kind, seconds, message = (tmp_path / "learned").read_text().split(" ", 2)
    assert kind == "PeerLostError"
    assert "rank 1" in message
    assert float(seconds) < 5


def test_ranks_can_train_again_after_an_exception_on_every_rank(tmp_path: Path) -> None:
    found = run_local(program.caught, (LIGHTNING, str(tmp_path)), num_proc=2)
    assert found == [[True] * 4] * 2


def test_error_for_too_many_devices_shows_how_to_start_ranks() -> None:
    (alone,) = run_local(program.refused, (LIGHTNING,), num_proc=1)
    assert (
        "Trainer(devices=4, num_nodes=1, strategy='sparkhvd'): this process is a job of one rank"
        in alone
    )
    assert "`sparkhvdrun -np 4 python script.py`" in alone
    two = run_local(program.refused, (LIGHTNING,), num_proc=2)
    assert (
        two
        == [
            "Trainer(devices=4, num_nodes=1, strategy='sparkhvd') needs 4 ranks, but 2 were started, on 1 host(s). Leave devices and "
            "num_nodes out, or give numbers whose product is the number of ranks."
        ]
        * 2
    )
