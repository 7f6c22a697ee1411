"""The learning-rate scheduler: built from the user's function, moved per epoch or per step."""

from __future__ import annotations

from typing import Any

import torch

from sparkhvd.training.early_stopping import Monitor
from sparkhvd.training.schedulers import make_scheduler
from sparkhvd.training.together import fail_together

__all__ = ["Schedule"]

_Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


class Schedule:
    """Moves a scheduler at the right moments; does nothing where there is none.

    Attributes:
        scheduler: what the user's function made, or None.
    """

    def __init__(
        self,
        function: Any,
        optimizer: torch.optim.Optimizer,
        *,
        interval: str,
        monitor: Monitor,
        steps_per_epoch: int,
        epochs: int,
    ) -> None:
        """Call the user's function.

        Args:
            function: of (optimizer) or (optimizer, total_steps); None for no scheduler.
            optimizer: the distributed one.
            interval: "epoch" or "step".
            monitor: what a ReduceLROnPlateau looks at.
            steps_per_epoch: optimizer steps of an epoch.
            epochs: of the fit.

        Raises:
            InvalidArgumentError: a ReduceLROnPlateau was to be moved per step; on all ranks.
        """
        self._is_per_step = interval == "step"
        self._monitor = monitor
        self.scheduler: Any = None
        if function is None:
            return
        total = epochs * steps_per_epoch if self._is_per_step else epochs
        self.scheduler = make_scheduler(function, optimizer, total)
        if self._is_per_step and isinstance(self.scheduler, _Plateau):
            fail_together(
                "lr_scheduler_interval is 'step' and lr_scheduler makes a ReduceLROnPlateau, which looks at a number of "
                "each epoch. Leave lr_scheduler_interval at 'epoch'."
            )

    def after_step(self) -> None:
        """A step of the optimizer was made."""
        if self._is_per_step and self.scheduler is not None:
            self.scheduler.step()

    def after_epoch(self, record: dict[str, Any]) -> None:
        """An epoch has ended with this record, which is equal on all ranks."""
        if self._is_per_step or self.scheduler is None:
            return
        if isinstance(self.scheduler, _Plateau):
            self.scheduler.step(self._monitor.value(record))
        else:
            self.scheduler.step()
