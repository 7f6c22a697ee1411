"""Best epoch and early stopping, computed from the history.

The history is equal on all ranks and restored with every checkpoint, so all ranks decide alike, and so does a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.training.types import Value


@dataclass(frozen=True)
class Monitor:
    """Number to compare epochs by, and whether less or more is better.

    Attributes:
        name: key of the number in the history.
        mode: "min" or "max".
    """

    name: str = "loss"
    mode: str = "min"

    def value(self, record: Mapping[str, Value]) -> float:
        """Read the number from the record of an epoch.

        Raises:
            InvalidArgumentError: the record does not have it.
        """
        value = record.get(self.name)
        if not isinstance(value, (int, float)):
            known = listed(repr(k) for k, v in record.items() if isinstance(v, (int, float)))
            raise InvalidArgumentError(
                f"monitor is {self.name!r}, but the record of an epoch has no number of that name. It has {known}."
            )
        return float(value)

    def is_better(self, value: float, than: float | None, min_delta: float = 0.0) -> bool:
        """Check whether a value is better than an earlier value by more than `min_delta`.

        NaN is never better.
        """
        if value != value:
            return False
        if than is None:
            return True
        return value < than - min_delta if self.mode == "min" else value > than + min_delta


@dataclass(frozen=True)
class EarlyStopping:
    """Rule for stopping a fit before its last epoch.

    Attributes:
        monitor: the number that must improve.
        patience: epochs without an improvement before the fit stops, at least 1.
        min_delta: an improvement is more than this, at least 0.
    """

    monitor: Monitor
    patience: int = 1
    min_delta: float = 0.0


def best_epoch(
    history: Sequence[Mapping[str, Value]], monitor: Monitor, saved: Collection[int] | None = None
) -> int:
    """Find the first epoch with the best value, or the last epoch if every value is NaN.

    With `saved` only these epochs are compared, because a custom loop need not save every epoch.
    """
    candidates = [r for r in history if saved is None or r["epoch"] in saved]
    best, epoch = None, _epoch(candidates[-1]) if candidates else len(history)
    for record in candidates:
        value = monitor.value(record)
        if monitor.is_better(value, best):
            best, epoch = value, _epoch(record)
    return epoch


def _epoch(record: Mapping[str, Value]) -> int:
    return int(record["epoch"] or 0)


class Stopper:
    """Decision to stop the epochs of a growing history.

    Each record is read once, because a run may have thousands.

    Args:
        early_stopping: the rule; None never stops.
    """

    def __init__(self, early_stopping: EarlyStopping | None) -> None:
        self._rule = early_stopping
        self._best: float | None = None
        self._value = math.nan  # of the last epoch
        self._num_waited = self._num_read = 0

    def reason_to_stop(self, history: Sequence[Mapping[str, Value]]) -> str:
        """Decide whether to stop after these epochs. Return the reason, or "" to continue."""
        if self._rule is None:
            return ""
        monitor, min_delta = self._rule.monitor, self._rule.min_delta
        for record in history[self._num_read :]:
            self._value = monitor.value(record)
            if monitor.is_better(self._value, self._best, min_delta):
                self._best, self._num_waited = self._value, 0
            else:
                self._num_waited += 1
        self._num_read = len(history)
        if self._num_waited < self._rule.patience:
            return ""
        epochs = f"{self._num_waited} epoch{'s' * (self._num_waited != 1)}"
        if self._best is None:
            return f"{monitor.name} has not improved for {epochs} (it was never a number)"
        if not min_delta:
            return f"{monitor.name} has not improved for {epochs} (its best is {self._best:.6g})"
        # Show the reference instead of the best value: an improvement of at most min_delta does not change the reference.
        return (
            f"{monitor.name} has not improved by more than min_delta={min_delta:g} for {epochs} (it was "
            f"{self._best:.6g} before, and is {self._value:.6g})"
        )
