"""Summary of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkhvd.training.types import History

__all__ = ["TrainingSummary"]


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
        return ", ".join([epochs, *shown, f"{sum(self.timings.values()):.1f} s"])
