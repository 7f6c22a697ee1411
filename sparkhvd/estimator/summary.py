"""Summary of a training, and its history in Horovod's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkhvd.training.types import History
from sparkhvd.training.user_code.logs import RESERVED

__all__ = ["TrainingSummary", "horovod_history"]


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a training; `str` gives it in one line.

    Attributes:
        history: one record per epoch.
        timings: seconds of the phases: materialize, launch, train.
        run_id: name of the run in the store.
    """

    history: History
    timings: Mapping[str, float]
    run_id: str

    @property
    def totalIterations(self) -> int:  # noqa: N802 - Spark's name
        """Number of epochs."""
        return len(self.history)

    @property
    def objectiveHistory(self) -> list[float]:  # noqa: N802 - Spark's name
        """Training loss of each epoch; epochs in which a loop of the user's own recorded none are left out."""
        losses = [record.get("loss") for record in self.history]
        return [float(loss) for loss in losses if isinstance(loss, (int, float))]

    def __str__(self) -> str:
        numbers = self.history[-1] if self.history else {}
        losses = {name: numbers[name] for name in ("loss", "val_loss") if name in numbers}
        shown = [f"{n} {v:.4g}" for n, v in losses.items() if isinstance(v, (int, float))]
        epochs = f"{len(self.history)} epoch" + ("" if len(self.history) == 1 else "s")
        if self.timings:
            shown.append(f"{sum(self.timings.values()):.1f} s")
        return ", ".join([epochs, *shown])


def horovod_history(history: History, num_labels: int) -> History:
    """Return the records with the numbers of training and validation apart, as Horovod has them.

    Args:
        history: flat records; those that have this shape already stay as they are.
        num_labels: metrics by number are in groups of so many.
    """
    return [r if "train" in r else _nested(r, max(1, num_labels)) for r in history]


def _nested(record: Mapping[str, Any], num_labels: int) -> dict[str, Any]:
    of_epoch = {n: v for n, v in record.items() if n in RESERVED and n != "loss"}
    measured = {n: v for n, v in record.items() if n not in of_epoch}
    parts = {
        "train": {n: v for n, v in measured.items() if not n.startswith("val_")},
        "validation": {n[4:]: v for n, v in measured.items() if n.startswith("val_")},
    }
    for part in parts.values():
        metrics = [value for name, value in part.items() if name != "loss"]
        starts = range(0, len(metrics), num_labels)
        part["all_metrics"] = [metrics[start : start + num_labels] for start in starts]
    if len(parts["validation"]) == 1:  # there was none
        del parts["validation"]
    return {**of_epoch, **parts}
