"""Learning-rate schedules per step and per epoch, and fits that end early."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from sparkhvd.data.reading.sampler import split_validation
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.checkpoints.resume import differences
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from sparkhvd.training.schedule import Schedule, describe_scheduler
from tests.harness.ranks import RanksFailed
from tests.training.ranks import Case, assert_close, linear

pytestmark = pytest.mark.pure

# 75 rows in steps of 2 * 8 * 2: 3 steps per epoch.
STEPS = 3
OPTIONS = {"batch_size": 8, "accumulate": 2, "epochs": 2, "lr_scheduler_interval": "step"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def case(store: Store, scheduler: Any, **options: Any) -> Case:
    model = linear(torch.float64)
    return Case(
        store,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        rows=75,
        dtype="float64",
        lr_scheduler=scheduler,
        options={**OPTIONS, **options},
    )


def one_cycle(optimizer: Any, total_steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=total_steps)


def test_scheduler_advances_after_each_step(store: Store) -> None:
    ranks = case(store, one_cycle)
    result = ranks.train(2)
    ranks.lr_scheduler = functools.partial(one_cycle, total_steps=2 * STEPS)
    expected = ranks.reference(2, 2)
    assert_close(ranks.weights(2), expected[1], 1e-10)
    saved = ranks.checkpoint(2).scheduler
    assert saved is not None
    assert saved["last_epoch"] == 2 * STEPS
    assert result.history[1]["lr"] == pytest.approx(saved["_last_lr"][0])


def test_schedule_length_is_independent_of_steps_per_epoch() -> None:
    """A change of ranks divides the epoch into another number of steps, and OneCycleLR refuses an extra step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = Schedule(
        one_cycle, optimizer, interval="step", monitor=Monitor(), steps_per_epoch=12, epochs=4
    )
    scheduler: Any = schedule.scheduler
    for epoch, steps in enumerate((12, 7, 5, 13), 1):
        schedule.spread(steps)
        for _ in range(steps):
            optimizer.step()
            schedule.after_step()
        assert scheduler.last_epoch == 12 * epoch
    # Steps of an epoch that was divided again more than once.
    optimizer.step()
    schedule.after_step()
    assert scheduler.last_epoch == scheduler.total_steps


def test_total_steps_is_epochs_if_interval_is_epoch(store: Store) -> None:
    ranks = case(store, one_cycle, lr_scheduler_interval="epoch")
    ranks.train(2)
    saved = ranks.checkpoint(2).scheduler
    assert saved is not None
    assert (saved["total_steps"], saved["last_epoch"]) == (2, 2)


def test_plateau_scheduler_uses_the_same_monitor_value_on_all_ranks(store: Store) -> None:
    def plateau(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)

    ranks = case(
        store,
        plateau,
        epochs=6,
        lr_scheduler_interval="epoch",
        has_validation=True,
        validation=0.3,
        monitor=Monitor("val_loss"),
    )
    history = ranks.train(2).history
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    expected, scheduler = [], plateau(optimizer)
    for record in history:
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(record["val_loss"])
    assert [r["lr"] for r in history] == expected
    assert expected[-1] < expected[0]


def test_plateau_scheduler_per_step_is_refused(store: Store) -> None:
    with pytest.raises(RanksFailed) as failed:
        case(store, lr_scheduler.ReduceLROnPlateau).train(2)
    for error in failed.value.errors.values():
        assert isinstance(error, InvalidArgumentError)
        assert str(error) == (
            "lr_scheduler_interval is 'step', but lr_scheduler makes a ReduceLROnPlateau, which needs"
            " a number of each epoch. Leave lr_scheduler_interval at 'epoch'."
        )


def test_a_per_step_schedule_resumes_at_its_last_step(tmp_path: Path) -> None:
    whole = case(Store.create(tmp_path / "whole"), one_cycle, epochs=4)
    parts = case(Store.create(tmp_path / "parts"), one_cycle, epochs=4)
    expected = whole.train(2).history
    # A fit of 4 epochs that is cut after 2.
    parts.train(2, early_stopping=EarlyStopping(Monitor(), 1, min_delta=1e9))
    assert parts.checkpoint(2).scheduler["last_epoch"] == 2 * STEPS
    found = parts.train(2).history
    assert [r["lr"] for r in found] == [r["lr"] for r in expected]
    for name, value in whole.weights(4).items():
        assert torch.equal(value, parts.weights(4)[name]), name


def test_a_fit_stops_without_improvement_and_does_not_resume(store: Store) -> None:
    early = EarlyStopping(Monitor("loss"), patience=2, min_delta=1e9)
    ranks = case(store, None, epochs=9, early_stopping=early, lr_scheduler_interval="epoch")
    result = ranks.train(3)
    assert len(result.history) == 3
    assert result.epoch == 3
    first, last = result.history[0]["loss"], result.history[-1]["loss"]
    assert result.stopped == (
        "loss has not improved by more than min_delta=1e+09 for 2 epochs (it was "
        f"{first:.6g} before, and is {last:.6g})"
    )
    again = ranks.train(2)
    assert again.history == result.history
    assert again.stopped == result.stopped


def test_steps_per_epoch_params_shorten_an_epoch(store: Store) -> None:
    ranks = case(
        store,
        one_cycle,
        train_steps_per_epoch=1,
        validation_steps_per_epoch=2,
        val_batch_size=4,
        has_validation=True,
        validation=0.3,
    )
    history = ranks.train(2).history
    assert [r["rows"] for r in history] == [32, 32]
    checkpoint = ranks.checkpoint(2)
    assert checkpoint.scheduler["total_steps"] == checkpoint.scheduler["last_epoch"] == 2
    # Two batches of 4 on 2 ranks: the first 16 of 22 validation rows.
    rows = split_validation(75, 0.3, 0)[1][:16]
    ranks.model.load_state_dict(checkpoint.model)
    with torch.no_grad():
        output = ranks.model(torch.from_numpy(ranks.values["x"][rows]))[:, 0]
    expected = (output - torch.from_numpy(ranks.values["y"][rows])).square().mean()
    assert history[-1]["val_loss"] == pytest.approx(float(expected), rel=1e-10)


def test_metric_can_select_the_best_epoch(store: Store) -> None:
    def most(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return output.abs().mean()

    monitor = Monitor("val_most", "max")
    ranks = case(
        store,
        lambda o: lr_scheduler.LambdaLR(o, lambda e: (1.0, -2.0, 1.0, 0.5)[e % 4]),
        epochs=5,
        lr_scheduler_interval="epoch",
        has_validation=True,
        validation=0.3,
        monitor=monitor,
        return_best=True,
    )
    ranks.metrics = {"most": most}
    result = ranks.train(2)
    values = [r["val_most"] for r in result.history]
    assert result.epoch == values.index(max(values)) + 1
    assert ranks.weights(result.epoch)  # it was kept


def test_numpy_learning_rate_is_saved_as_a_float(store: Store) -> None:
    def cosine(optimizer: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step / 10)))

    ranks = case(store, cosine)
    ranks.train(2, epochs=1)
    ranks.train(2)  # resumes from the checkpoint
    assert_close(ranks.weights(2), ranks.reference(2, 2)[1], 1e-10)
    assert type(ranks.checkpoint(2).scheduler["_last_lr"][0]) is float


class Twice:
    """User's scheduler with a number of numpy."""

    def __init__(self, optimizer: Any, factor: float) -> None:
        self.factor = np.float64(factor)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


def fails(optimizer: Any) -> Any:
    raise ValueError("not here")


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        (None, lambda o: lr_scheduler.StepLR(o, 1), "lr_scheduler was null and is {"),
        (
            lambda o: lr_scheduler.StepLR(o, 1),
            lambda o: lr_scheduler.StepLR(o, 2),
            "lr_scheduler: 'step_size' was 1 and is 2",
        ),
        (
            lambda o: lr_scheduler.ConstantLR(o),
            lambda o: lr_scheduler.ExponentialLR(o, 0.5),
            'lr_scheduler: \'kind\' was "ConstantLR" and is "ExponentialLR"',
        ),
        (one_cycle, one_cycle, ""),
        (
            one_cycle,
            lambda o, total_steps: lr_scheduler.OneCycleLR(o, 0.4, total_steps=total_steps),
            "lr_scheduler: 'max_lr of group 0' was 0.5 and is 0.4",
        ),
        (
            lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
            lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
            "lr_scheduler: 'factors' differs",
        ),
        (
            lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5)]),
            lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.4)]),
            "lr_scheduler: 'schedulers' differs",
        ),
        (
            lambda o: Twice(o, 2),
            lambda o: Twice(o, 3),
            "lr_scheduler: 'factor' was 2.0 and is 3.0",
        ),
        (fails, fails, ""),
    ],
)
def test_runs_with_different_schedulers_are_distinguished(
    before: Any, now: Any, difference: str
) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = copy.deepcopy((optimizer.state_dict(), sorted(vars(optimizer))))
    texts = [json.dumps({"lr_scheduler": describe_scheduler(f, optimizer)}) for f in (before, now)]
    found = differences(*texts)
    assert found.startswith(difference) if difference else not found
    assert (optimizer.state_dict(), sorted(vars(optimizer))) == state  # nothing hangs on it
