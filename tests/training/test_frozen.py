"""Frozen parameters: in one file for all checkpoints, broadcast only if ranks differ, and never lost."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator import Callback
from sparkhvd.torch.context import use_engine
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.frozen import broadcast_weights, frozen_sums
from tests.harness.ranks import RanksFailed, run_ranks
from tests.training.ranks import RUN_DIR, Case, without_times

pytestmark = pytest.mark.ranks

FOLDER = f"{RUN_DIR}/checkpoints"
FROZEN = ["0.weight", "0.bias", "2.weight", "2.bias"]


class FailsAt(Callback):
    """Ends the run at a step, counted over all epochs."""

    step = 0

    def on_step_end(self, ctx: Any, loss: float | None) -> None:
        if ctx.step == FailsAt.step:
            raise ValueError("a loss")


class Changes(Callback):
    """Trains one more layer from the second epoch on. At its end, it writes to a frozen layer without autograd."""

    def on_epoch_begin(self, ctx: Any) -> None:
        ctx.model[2].requires_grad_(ctx.epoch >= 2)

    def on_epoch_end(self, ctx: Any, record: Any) -> None:
        if ctx.epoch == 2:
            ctx.model[0].weight.data.neg_()


def net(seed: int = 4, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)]
    model = nn.Sequential(*layers)
    model[:3].requires_grad_(False)
    return model


def case(folder: Path, model: nn.Module, *callbacks: Callback, **options: Any) -> Case:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    user = {"callbacks": [FailsAt(), *callbacks]}
    options = {"batch_size": 8, "epochs": 3, "num_checkpoints": 3, **options}
    return Case(Store.create(folder), model, optimizer, options=options, user=user)


def frozen_files(one: Case) -> list[str]:
    return [path for path in one.store.list(FOLDER) if "/frozen-" in path]


def broadcast_bytes() -> int:
    entries = hvd.metrics().counters["collectives"]
    return sum(entry["bytes"] for entry in entries if entry["collective"] == "broadcast")


def fails_and_goes_on(one: Case, step: int, again: nn.Module) -> Any:
    """Train until a step, and then to the end with another module."""
    FailsAt.step = step
    try:
        with pytest.raises(RanksFailed):
            one.train(2)
    finally:
        FailsAt.step = 0
    one.model, one.optimizer = again, torch.optim.Adam(again.parameters(), lr=0.01)
    return one.train(2)


def assert_same_weights(one: Case, other: Case, epoch: int = 3) -> None:
    expected = other.weights(epoch)
    assert all(torch.equal(value, expected[name]) for name, value in one.weights(epoch).items())


def test_checkpoints_share_one_file_of_frozen_parameters(tmp_path: Path) -> None:
    model = net(width=200)
    one = case(tmp_path, model)
    before = copy.deepcopy(model.state_dict())
    one.train(2)
    (path,) = frozen_files(one)
    assert one.store.num_bytes(path) > 4 * (200 * 200 + 200)
    for epoch in (1, 2, 3):
        assert one.store.num_bytes(f"{FOLDER}/epoch-{epoch}.pt") < 14_000
        checkpoint = one.checkpoint(epoch)
        assert checkpoint.frozen["names"] == FROZEN
        assert all(torch.equal(checkpoint.model[name], before[name]) for name in FROZEN)
    assert not torch.equal(checkpoint.model["3.weight"], before["3.weight"])


@pytest.mark.parametrize("step", [9, 16], ids=["in the second epoch", "in the third"])
def test_a_run_resumes_with_its_saved_frozen_parameters(tmp_path: Path, step: int) -> None:
    whole, parts = (case(tmp_path / name, net()) for name in ("whole", "parts"))
    expected = whole.train(2)
    # Like a script that makes a module from random numbers each time.
    found = fails_and_goes_on(parts, step, net(seed=5))
    assert without_times(found) == without_times(expected)
    assert_same_weights(parts, whole)
    assert len(frozen_files(parts)) == 1


def test_parameters_that_user_code_unfreezes_or_changes_are_saved(tmp_path: Path) -> None:
    whole, parts = (case(tmp_path / name, net(), Changes()) for name in ("whole", "parts"))
    expected = whole.train(2)
    names = [whole.checkpoint(epoch).frozen["names"] for epoch in (1, 2, 3)]
    assert names == [FROZEN, ["0.bias"], ["0.bias"]]
    found = fails_and_goes_on(parts, 16, net())
    assert without_times(found) == without_times(expected)
    assert_same_weights(parts, whole)


def test_error_names_a_missing_frozen_parameters_file(tmp_path: Path) -> None:
    one = case(tmp_path, net())
    one.train(2)
    (path,) = frozen_files(one)
    one.store.delete(path)
    with pytest.raises(InvalidArgumentError, match=r"frozen-\w+\.pt.* is damaged or missing"):
        Checkpoints(one.store, RUN_DIR).load(3)


def test_frozen_parameters_are_broadcast_only_if_ranks_differ() -> None:
    made = net(width=200)  # threads draw from one generator

    def body(engine: Any) -> tuple[int, int, bool]:
        model = copy.deepcopy(made)
        with torch.no_grad():
            model[3].weight.fill_(hvd.rank())
        begin = broadcast_bytes()
        broadcast_weights(model)
        trained = broadcast_bytes()
        if hvd.rank() == 1:
            model[0].weight.data[0, 0] += 1
        broadcast_weights(model)
        is_alike = torch.equal(model[0].weight, made[0].weight)
        return trained - begin, broadcast_bytes() - trained, is_alike and not model[3].weight.any()

    trained, more = 4 * 201, 4 * 200 * 3
    assert run_ranks(2, body, using=use_engine) == [(trained, trained + more, True)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_frozen_checksum_depends_on_values_signs_and_positions(dtype: torch.dtype) -> None:
    values = torch.randn(300_001).to(dtype)
    values[0], values[-1] = 1, 0

    def sums(changed: torch.Tensor) -> Any:
        holder = nn.Module()
        holder.p = nn.Parameter(changed, requires_grad=False)
        return frozen_sums(holder)["p"]

    assert sums(values) == sums(values.clone())
    others = [values.flip(0), values[1:], values.reshape(1, -1)]
    others += [] if dtype == torch.bool else [-values, values + 1]
    assert all(sums(values) != sums(other) for other in others)


def test_history_can_be_written_during_a_frozen_parameters_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two writes takes over the folder and deletes unfinished files, except those of its own fit."""
    checkpoints = Checkpoints(Store.create(tmp_path / "store"), "runs/r")
    rename = os.replace
    written = []

    def replace(source: str, target: str) -> None:
        if not written and "frozen-" in target:
            written.append(target)
            checkpoints.write_history([{"epoch": 1}])
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    sha256 = checkpoints.write_frozen({"w": torch.ones(3)})
    assert written
    assert list((tmp_path / "store").rglob(f"frozen-{sha256}*"))
    assert list((tmp_path / "store").rglob("metrics.jsonl"))
