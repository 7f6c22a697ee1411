"""The learning-rate scheduler of a run: built from the user's function, stepped per epoch or per step."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler

from sparkhvd.training.early_stopping import Monitor
from sparkhvd.training.schedulers import make_scheduler
from sparkhvd.training.together import fail_together
from sparkhvd.training.types import MakeScheduler, Record

__all__ = ["Schedule"]

# Of sums of fractions.
_ROUNDING = 1e-6

_Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


class Schedule:
    """Steps the scheduler per epoch or per optimizer step; does nothing without one.

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
            optimizer: the distributed one; None where `train_fn` has its own.
            interval: "epoch" or "step".
            monitor: the number that a ReduceLROnPlateau follows.
            steps_per_epoch: optimizer steps of an epoch; see `spread`.
            epochs: of the fit.

        Raises:
            InvalidArgumentError: a ReduceLROnPlateau is stepped per step; on all ranks.
        """
        self._is_per_step = interval == "step"
        # Of the scheduler per step of the optimizer, and those that are due.
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
            fail_together(
                "lr_scheduler_interval is 'step' and lr_scheduler makes a ReduceLROnPlateau, which looks at a number of "
                "each epoch. Leave lr_scheduler_interval at 'epoch'."
            )

    def spread(self, num_steps: int) -> None:
        """Move a scheduler as often in an epoch as it was made for, where an epoch has another number of steps with these ranks."""
        self._moves, self._due = self._steps_per_epoch / num_steps, 0.0
        self._most = self._epochs * self._steps_per_epoch

    def after_step(self) -> None:
        """Step a scheduler that is moved per step."""
        if not self._is_per_step or self.scheduler is None:
            return
        self._due += self._moves
        while self._due > 1 - _ROUNDING:
            self._due -= 1
            # Many know no more steps than that.
            if getattr(self.scheduler, "last_epoch", 0) < self._most:
                self.scheduler.step()

    def after_epoch(self, record: Record) -> None:
        """Step a scheduler that is moved per epoch; `record` is equal on all ranks."""
        if self._is_per_step or self.scheduler is None:
            return
        if isinstance(self.scheduler, _Plateau):
            self.scheduler.step(self._monitor.value(record))
        else:
            self.scheduler.step()
