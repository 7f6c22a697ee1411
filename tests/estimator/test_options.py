"""Params of the training loop: the values that ranks get, and early refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.estimator import TorchEstimator
from sparkhvd.estimator.fitting.request import loop_options
from sparkhvd.estimator.params.groups import rank_options
from sparkhvd.training.early_stopping import EarlyStopping, Monitor
from sparkhvd.training.spec import TrainSpec

pytestmark = pytest.mark.pure


def options(dtype: torch.dtype = torch.float32, **params: Any) -> dict[str, Any]:
    values = TorchEstimator(**params)._options()
    loop = loop_options(
        values,
        model=nn.Linear(2, 1).to(dtype),
        metric_names=["accuracy", "f1"],
        has_validation=bool(values.validation),
    )
    return {**rank_options(values), **vars(loop)}


def test_option_defaults_equal_the_training_spec_defaults() -> None:
    given = options()
    assert given == {name: TrainSpec.__dataclass_fields__[name].default for name in given}


def test_validation_determines_the_default_monitor() -> None:
    assert options(validation=0.5)["monitor"] == Monitor("val_loss")
    assert options(monitor="f1_2", monitor_mode="max")["monitor"] == Monitor("f1_2", "max")


@pytest.mark.parametrize("name", ["train_step", "validation_step", "train_fn", "callbacks"])
def test_logged_values_can_be_monitored(name: str) -> None:
    user = {name: [object()] if name == "callbacks" else print}
    given = options(validation=0.5, monitor="val_own", early_stopping={"monitor": "own"}, **user)
    assert given["monitor"] == Monitor("val_own")
    assert given["early_stopping"] == EarlyStopping(Monitor("own"))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"return_model": "last", "validation": 0.1}, False),
        ({"return_model": "best", "validation": 0.1}, True),
        ({"restore_best": True, "validation": 0.1}, True),
        ({"return_model": "best", "monitor": "loss"}, True),
    ],
)
def test_return_model_and_restore_best_select_the_returned_model(
    params: dict[str, Any], expected: bool
) -> None:
    assert options(**params)["return_best"] is expected


def test_early_stopping_uses_the_fit_monitor_by_default() -> None:
    assert options(early_stopping={}, validation="v")["early_stopping"] == EarlyStopping(
        Monitor("val_loss"), 1, 0.0
    )
    own = {"monitor": "val_f1", "mode": "max", "patience": 3, "min_delta": 0.01}
    assert options(early_stopping=own, validation="v")["early_stopping"] == EarlyStopping(
        Monitor("val_f1", "max"), 3, 0.01
    )


def test_backward_passes_per_step_is_an_alias_of_accumulate() -> None:
    assert options(backward_passes_per_step=4)["accumulate"] == 4
    assert options(accumulate=4)["accumulate"] == 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"accumulate": 0}, "accumulate is 0; it must be at least 1."),
        ({"gradient_clip_value": -1}, "gradient_clip_value is -1.0; it must be more than 0."),
        (
            {"precision": "16"},
            "precision is '16'; it must be one of '32', 'bf16-mixed', '16-mixed'.",
        ),
        (
            {"precision": "bf16-mixed", "dtype": torch.float64},
            "precision is 'bf16-mixed', but the model's parameters are float64. Mixed precision needs"
            " parameters in float32, and computes in 16 bits. Call model.float(), or leave precision "
            "at '32', which computes in the model's own dtype.",
        ),
        (
            {"lr_scheduler_interval": "batch"},
            "lr_scheduler_interval is 'batch'; it must be one of 'epoch', 'step'.",
        ),
        (
            {"validation_steps_per_epoch": 3},
            "validation_steps_per_epoch is given, but there are no validation rows. Set validation, for example 0.1.",
        ),
        ({"monitor_mode": "up"}, "monitor_mode is 'up'; it must be one of 'min', 'max'."),
        (
            {"monitor": "val_loss"},
            "monitor is 'val_loss', which the history will not have. It will have 'loss', 'accuracy', 'f1'.",
        ),
        (
            {"return_model": "first"},
            "return_model is 'first'; it must be one of 'best', 'last'.",
        ),
        (
            {"return_model": "last", "restore_best": True, "validation": 0.1},
            "return_model is 'last', but restore_best is True, which means return_model='best'. Give only one of them.",
        ),
        (
            {"return_model": "best"},
            "return_model='best' needs validation rows to decide which epoch is best. Set validation, for example 0.1, "
            "or set monitor to another key of the history.",
        ),
        (
            {"early_stopping": {"wait": 2}},
            "early_stopping has 'wait'. It may have 'monitor', 'mode', 'patience' and 'min_delta'.",
        ),
        (
            {"early_stopping": {"patience": 0}},
            "early_stopping's patience is 0; it must be a whole number of epochs, at least 1.",
        ),
        (
            {"early_stopping": {"min_delta": -1}},
            "early_stopping's min_delta is -1; it must be a number, at least 0.",
        ),
        (
            {"early_stopping": {"monitor": "auc"}},
            "early_stopping's monitor is 'auc', which the history will not have. It will have 'loss', 'accuracy', 'f1'.",
        ),
    ],
)
def test_impossible_training_options_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as failed:
        options(**params)
    assert str(failed.value) == message
