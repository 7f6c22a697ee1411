"""Keras 3 with `sparkhvd.keras`: each training on 2 and on 3 ranks equals one process with the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkhvd.errors import RankError
from sparkhvd.runner import run_local
from tests.harness.paths import ROOT

pytest.importorskip("torch")
os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="runs where keras is: make test-users")

from tests.soak.users import keras_program as program  # noqa: E402 - after importorskip

# Importing Keras takes long on a busy machine.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
# Sums of three ranks' gradients are rounded differently from sums of one batch, most of all in half precision.
ROUNDING, OF_CASE = 2e-5, {"half": 1e-3}


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_local(program.results, (list(program.CASES),), num_proc=1)[0]


def assert_same(found: dict[str, Any], alone: dict[str, Any]) -> None:
    for case, values in found.items():
        for key, value in values.items():
            wanted = pytest.approx(alone[case][key], abs=OF_CASE.get(case, ROUNDING))
            assert value == wanted, f"{case}: {key}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_keras_training_equals_one_process(alone: Any, ranks: int) -> None:
    for found in run_local(program.results, (list(program.CASES),), num_proc=ranks):
        assert_same(found, alone)
        assert_same({"whole": {"numbers": found["saved"]["numbers"]}}, alone)


LAUNCHERS = {
    "sparkhvdrun": [sys.executable, "-m", "sparkhvd.runner.command", "-np", "2", sys.executable],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_keras_ranks_of_every_launcher_equal_one_process(
    launcher: str, alone: Any, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    command = [*LAUNCHERS[launcher], "-m", program.__name__, str(file), "momentum", "adam"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert_same(json.loads(file.read_text()), alone)


def test_warm_up_follows_the_formula_and_corrects_the_momentum() -> None:
    epochs, warmup, steps, ranks = 4, 2, program.ROWS // program.BATCH, 2
    arguments = ("LearningRateWarmupCallback", {"warmup_epochs": warmup}, True)
    for found in run_local(program.rates, arguments, num_proc=ranks):
        wanted = [
            0.1 / ranks * (min((step + 1) / steps, warmup) * (ranks - 1) / warmup + 1)
            for step in range(epochs * steps)
        ]
        rates = [rate for rate, _ in found["steps"]]
        assert rates == pytest.approx(wanted, rel=1e-5)
        # The velocity contains the rate of the previous step.
        ratios = [after / before for before, after in zip([0.1, *rates], rates, strict=False)]
        momenta = [momentum for _, momentum in found["steps"]]
        assert momenta == pytest.approx([0.9 * ratio for ratio in ratios], rel=1e-5)
        assert found["lr"] == pytest.approx([0.075, 0.1, 0.1, 0.1], rel=1e-5)


def test_learning_rate_schedules_apply_per_epoch_or_batch() -> None:
    falling = {"multiplier": lambda epoch: 0.1**epoch, "start_epoch": 1, "end_epoch": 3}
    for found in run_local(
        program.rates, ("LearningRateScheduleCallback", falling, False), num_proc=2
    ):
        assert found["lr"] == pytest.approx([0.1, 0.01, 0.001, 0.001], rel=1e-5)
        assert {momentum for _, momentum in found["steps"]} == {0.9}
    smooth = {"multiplier": lambda epoch: 1 / (1 + epoch), "staircase": False}
    for found in run_local(
        program.rates, ("LearningRateScheduleCallback", smooth, True), num_proc=2
    ):
        assert found["lr"] == pytest.approx([0.1 / (2 + epoch) for epoch in range(4)], rel=1e-5)


def test_ranks_with_different_metrics_stop_and_reduce_rates_together() -> None:
    first, second = run_local(program.stopped, num_proc=2)
    assert first == second
    assert len(first["loss"]) < 40
    assert first["learning_rate"][-1] < first["learning_rate"][0]


def test_driver_raises_the_original_exception_rather_than_its_consequences(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Rank 1 of 2 .* raised ValueError: the third step"):
        run_local(program.fails, ("raised", str(tmp_path)), num_proc=2)


def test_killed_rank_is_named_on_the_others_and_on_the_driver(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Rank 1 of 2 .* ended with signal SIGKILL"):
        run_local(program.fails, ("killed", str(tmp_path)), num_proc=2)
    kind, seconds, message = (tmp_path / "learned").read_text().split(" ", 2)
    assert kind == "PeerLostError"
    assert "rank 1" in message
    assert float(seconds) < 5


def test_wrong_keras_calls_raise_errors_with_a_remedy() -> None:
    messages, _ = run_local(program.refused, num_proc=2)
    wanted = [
        "expected an optimizer of Keras, got str",
        "is already a DistributedOptimizer",
        "op=Adasum is not supported for Keras, because it combines the optimizer's steps",
        "backward_passes_per_step is 0",
        "Keras 3 has no global variables",
        "Call model.build(input_shape) before",
        "warmup_epochs is 0",
        "initial_lr is None",
        "the learning rate of the optimizer is a LearningRateSchedule",
    ]
    assert len(messages) == len(wanted)
    for message, part in zip(messages, wanted, strict=True):
        assert part in message


@pytest.mark.parametrize("script", ["train.py"])
def test_keras_example_script_runs(script: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS["sparkhvdrun"], f"examples/keras/{script}", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "accuracy" in ended.stdout
