"""The learning-rate scheduler of a run, made by the user's function and stepped per epoch or per step."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import SupportsFloat

import torch
from torch.optim.lr_scheduler import LRScheduler

from sparkhvd.training.early_stopping import Monitor
from sparkhvd.training.rank_sync import raise_on_all_ranks
from sparkhvd.training.types import MakeScheduler, Record

# Tolerance for sums of fractions.
_ROUNDING = 1e-6

_Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


class Schedule:
    """Stepping of an optional scheduler, per epoch or per optimizer step.

    Attributes:
        scheduler: made by the user's function, or None.
    """

    def __init__(
        self,
        function: MakeScheduler | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        interval: str,
        monitor: Monitor,
        steps_per_epoch: int,
        epochs: int,
    ) -> None:
        """Call the user's function.

        Args:
            function: of (optimizer) or (optimizer, total_steps); None for no scheduler.
            optimizer: the distributed one; None if `train_fn` has its own.
            interval: "epoch" or "step".
            monitor: the number that a ReduceLROnPlateau follows.
            steps_per_epoch: optimizer steps of an epoch; see `spread`.
            epochs: of the fit.

        Raises:
            InvalidArgumentError: a ReduceLROnPlateau is stepped per step; on all ranks.
        """
        self._is_per_step = interval == "step"
        # Number of scheduler steps per optimizer step, and the fraction of a scheduler step that is due.
        self._moves, self._due = 1.0, 0.0
        self._most = math.inf
        self._steps_per_epoch, self._epochs = steps_per_epoch, epochs
        self._monitor = monitor
        self.scheduler: LRScheduler | None = None
        if function is None or optimizer is None:
            return
        total = epochs * steps_per_epoch if self._is_per_step else epochs
        self.scheduler = make_scheduler(function, optimizer, total)
        if self._is_per_step and isinstance(self.scheduler, _Plateau):
            raise_on_all_ranks(
                "lr_scheduler_interval is 'step', but lr_scheduler makes a ReduceLROnPlateau, which needs a number of "
                "each epoch. Leave lr_scheduler_interval at 'epoch'."
            )

    def spread(self, num_steps: int) -> None:
        """Adapt to the current ranks' number of optimizer steps.

        The number of scheduler steps per epoch stays the same.
        """
        self._moves, self._due = self._steps_per_epoch / num_steps, 0.0
        self._most = self._epochs * self._steps_per_epoch

    def after_step(self) -> None:
        """Step a scheduler with interval "step"."""
        if not self._is_per_step or self.scheduler is None:
            return
        self._due += self._moves
        while self._due > 1 - _ROUNDING:
            self._due -= 1
            # Do not exceed the total number of steps, because many schedulers then raise an error.
            if getattr(self.scheduler, "last_epoch", 0) < self._most:
                self.scheduler.step()

    def after_epoch(self, record: Record) -> None:
        """Step a scheduler with interval "epoch". `record` must be the same on all ranks."""
        if self._is_per_step or self.scheduler is None:
            return
        if isinstance(self.scheduler, _Plateau):
            self.scheduler.step(self._monitor.value(record))
        else:
            self.scheduler.step()


# ----------------------------------------------------------------------------------------------------
# Construction of learning-rate schedulers, and their description for the comparison of two runs.

# Constant `total_steps` for a description, because the number of steps may change between fits with `epochs`.
_SOME_STEPS = 1_000_000
# Numbers of steps at which a scheduler's function is sampled.
_MOVES = (0, 1, 2, 3, 5, 10, 30, 100, 1000)
# Attributes that are not arguments: derived from the optimizer's learning rate, or internal.
_NO_ARGUMENTS = ("base_lrs", "_last_lr", "_step_count", "_is_initial", "_get_lr_called_within_step")


def make_scheduler(
    function: MakeScheduler, optimizer: torch.optim.Optimizer, total_steps: int
) -> LRScheduler:
    """Call the user's function of (optimizer) or (optimizer, total_steps)."""
    if _wants_total(function):
        return function(optimizer, total_steps=total_steps)
    return function(optimizer)


def _wants_total(function: MakeScheduler) -> bool:
    """Check whether a function has an argument `total_steps` without default."""
    try:
        parameter = inspect.signature(function).parameters.get("total_steps")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def describe_scheduler(
    function: MakeScheduler | None, optimizer: torch.optim.Optimizer
) -> dict[str, object] | None:
    """Describe class and arguments of the function's scheduler, or return None without a function.

    The optimizer is not changed, and its parameters are not copied. A function that cannot be called here is
    described by its name.
    """
    if function is None:
        return None
    trial = _without_parameters(optimizer)
    before = [dict(group) for group in trial.param_groups]
    try:
        scheduler = make_scheduler(function, trial, _SOME_STEPS)
    except Exception:  # noqa: BLE001 - the ranks will report it
        return {"function": getattr(function, "__qualname__", type(function).__qualname__)}
    # OneCycleLR and similar schedulers write their arguments into the optimizer's groups.
    written = {
        f"{key} of group {number}": plain(value)
        for number, (group, old) in enumerate(zip(trial.param_groups, before, strict=True))
        for key, value in group.items()
        if key not in old and key != "initial_lr" and is_plain(plain(value))
    }
    return {**_described(scheduler), **written}


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Copy an optimizer with the same groups, each with one small parameter and no state."""
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(()))]}
        for group in optimizer.param_groups
    ]
    return trial


def _described(scheduler: object) -> dict[str, object]:
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    described: dict[str, object] = {"kind": type(scheduler).__qualname__}
    for name, value in state.items():
        if name not in (*_NO_ARGUMENTS, "lr_lambdas", "_schedulers") and is_plain(plain(value)):
            described[name] = plain(value)
    if lambdas := getattr(scheduler, "lr_lambdas", None):
        described["factors"] = [_factors(function) for function in lambdas]
    if inner := getattr(scheduler, "_schedulers", None):
        described["schedulers"] = [_described(scheduler) for scheduler in inner]
    return described


def _factors(function: Callable[[int], SupportsFloat]) -> list[float | None]:
    """Sample a function of the number of steps."""
    factors: list[float | None] = []
    for number in _MOVES:
        try:
            factors.append(float(function(number)))
        except Exception:  # noqa: BLE001, PERF203 - a table that is too short
            factors.append(None)
    return factors


def plain(value: object) -> object:
    """Convert numpy and torch numbers to Python's, also in lists and dicts."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return plain(value.item()) if value.numel() == 1 else value
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()
    # Replace NaN by a text, because NaN does not equal itself and two equal fits must compare equal.
    return "nan" if isinstance(value, float) and value != value else value


def is_plain(value: object) -> bool:
    """Check whether a value can be compared as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
