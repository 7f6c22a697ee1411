"""The learning-rate scheduler of a run: built from the user's function, stepped per epoch or per step."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler

from sparkhvd.training.early_stopping import Monitor
from sparkhvd.training.schedulers import make_scheduler
from sparkhvd.training.together import fail_together
from sparkhvd.training.types import MakeScheduler, Record

__all__ = ["Schedule"]

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
            steps_per_epoch: optimizer steps of an epoch.
            epochs: of the fit.

        Raises:
            InvalidArgumentError: a ReduceLROnPlateau is stepped per step; on all ranks.
        """
        self._is_per_step = interval == "step"
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

    def after_step(self) -> None:
        """Step a scheduler that is moved per step."""
        if self._is_per_step and self.scheduler is not None:
            self.scheduler.step()

    def after_epoch(self, record: Record) -> None:
        """Step a scheduler that is moved per epoch; `record` is equal on all ranks."""
        if self._is_per_step or self.scheduler is None:
            return
        if isinstance(self.scheduler, _Plateau):
            self.scheduler.step(self._monitor.value(record))
        else:
            self.scheduler.step()
