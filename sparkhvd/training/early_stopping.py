"""Best epoch and early stopping, computed from the history.

The history is equal on all ranks and part of every checkpoint, so all ranks decide alike, and so does a resumed run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError
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
            known = ", ".join(repr(k) for k, v in record.items() if isinstance(v, (int, float)))
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


def reason_to_stop(
    history: Sequence[Mapping[str, Value]], early_stopping: EarlyStopping | None
) -> str:
    """Decide whether to stop after these epochs. Return the reason, or "" to continue."""
    if early_stopping is None:
        return ""
    best: float | None = None
    waited = 0
    monitor, min_delta = early_stopping.monitor, early_stopping.min_delta
    for record in history:
        value = monitor.value(record)
        if monitor.is_better(value, best, min_delta):
            best, waited = value, 0
        else:
            waited += 1
    if waited < early_stopping.patience:
        return ""
    plural = "s" * (waited != 1)
    if best is None:
        return f"{monitor.name} has not improved for {waited} epoch{plural} (it was never a number)"
    if not min_delta:
        return (
            f"{monitor.name} has not improved for {waited} epoch{plural} (its best is {best:.6g})"
        )
    # Show the reference instead of the best value: an improvement of at most min_delta does not change the reference.
    return (
        f"{monitor.name} has not improved by more than min_delta={min_delta:g} for {waited} epoch{plural} (it was "
        f"{best:.6g} before, and is {value:.6g})"
    )
