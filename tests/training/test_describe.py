"""Descriptions of fits: equal in all processes, different for every part on which a checkpoint depends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparkhvd.estimator.fitting.request import LoopOptions
from sparkhvd.training.checkpoints.resume import differences
from sparkhvd.training.early_stopping import Monitor
from sparkhvd.training.metrics import resolve_metrics
from sparkhvd.training.program import Program, describe_program
from sparkhvd.training.schedule import plain

pytestmark = pytest.mark.pure


class Scaled(nn.Module):
    """User's module with an option, and with attributes that differ in every process."""

    def __init__(self, factor: float = 2.0, label: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factor = factor
        self.label = label or str(id(self))
        self.made = object()
        self.calls = id(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def net(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *(parts or (nn.Tanh(),)), nn.Dropout(0.25), Scaled())


def described(
    model: nn.Module | None = None,
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    metrics: Any = ("mse",),
    *,
    as_function: bool = False,
) -> str:
    model = model or net()
    program = Program(
        model=model,
        optimizer=optimizer if as_function else optimizer(model.parameters()),
        losses=(nn.MSELoss(),),
        is_sum=(False,),
        metrics=resolve_metrics(list(metrics), ["y"], ["identity"]),
    )
    return json.dumps(describe_program(program), sort_keys=True)


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        (
            {"model": net()},
            {"model": net(nn.ReLU())},
            'modules: \'1\' was "Tanh()" and is "ReLU(inplace=false)"',
        ),
        (
            {"model": net(nn.Dropout(0.1))},
            {"model": net(nn.Dropout(0.2))},
            'modules: \'1\' was "Dropout(inplace=false, p=0.1)" and is "Dropout(inplace=false, p=0.2)"',
        ),
        (
            {"model": nn.Sequential(Scaled(2.0))},
            {"model": nn.Sequential(Scaled(3.0))},
            'modules: \'0\' was "Scaled(factor=2.0)[layer]" and is "Scaled(factor=3.0)[layer]"',
        ),
        (
            {"model": nn.Sequential(OrderedDict(a=nn.Tanh(), b=nn.Linear(2, 2)))},
            {"model": nn.Sequential(OrderedDict(b=nn.Linear(2, 2), a=nn.Tanh()))},
            'modules: \'\' was "Sequential()[a, b]" and is "Sequential()[b, a]"',
        ),
        (
            {},
            {"optimizer": lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.5)},
            "optimizer options: 'lr of group 0' was 0.1 and is 0.001",
        ),
        (
            {"optimizer": lambda p: torch.optim.Adam(p, betas=(0.9, 0.99))},
            {"optimizer": lambda p: torch.optim.Adam(p, betas=(0.8, 0.99), amsgrad=True)},
            "optimizer options: 'amsgrad of group 0' was false and is true, 'betas of group 0' was [0.9, 0.99] and is "
            "[0.8, 0.99]",
        ),
        ({}, {"metrics": ["mae"]}, "metrics: 'mae' is new, 'mse' is gone"),
        (
            {"metrics": ["mse", "mae"]},
            {"metrics": ["mae", "mse"]},
            'metrics: \'mae\' was [1, "mae"] and is [0, "mae"], \'mse\' was [0, "mse"] and is [1, "mse"]',
        ),
    ],
)
@pytest.mark.parametrize("as_function", [False, True])
def test_fit_descriptions_show_the_difference_of_two_fits(
    before: dict[str, Any], now: dict[str, Any], difference: str, as_function: bool
) -> None:
    first, second = (described(**one, as_function=as_function) for one in (before, now))
    assert differences(first, second) == difference
    assert differences(second, second) == ""


def test_fit_description_is_equal_in_another_process() -> None:
    # A plain optimizer would import torch's compiler for seconds.
    script = (
        "from sparkhvd import lazy_compiler; lazy_compiler.install(); "
        f"from {__name__} import described; print(described(), end='')"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    # Classes of `__main__` have it in their name, but here both modules are imported.
    assert differences(described(), other.stdout) == ""
    assert differences(described(), described(net())) == ""


def test_torchmetrics_metrics_are_compared_by_their_options() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.classification.MulticlassAccuracy
    three, four = (described(metrics=[accuracy(num_classes=n)]) for n in (3, 4))
    assert differences(three, described(metrics=[accuracy(num_classes=3)])) == ""
    assert differences(three, four) == "metrics: 'MulticlassAccuracy' differs"


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ((False, "loss", "min"), (False, "mse", "max"), ""),
        (
            (True, "loss", "min"),
            (True, "loss", "max"),
            'monitor was "min of loss" and is "max of loss"',
        ),
        (
            (False, "loss", "min"),
            (True, "loss", "min"),
            'return_model was "last" and is "best"; monitor was null and is "min of loss"',
        ),
    ],
)
def test_the_monitor_is_compared_only_if_it_selects_the_model(
    before: Any, now: Any, difference: str
) -> None:
    texts = [
        json.dumps(
            LoopOptions(Monitor(name, mode), return_best=is_best).describe(has_schedule=False)
        )
        for is_best, name, mode in (before, now)
    ]
    assert differences(*texts) == difference


def test_nan_learning_rate_equals_itself_in_descriptions() -> None:
    assert plain(torch.tensor(float("nan"))) == plain([float("nan")])[0] == "nan"
    assert plain(torch.tensor(0.5)) == 0.5
