"""Interface of loggers."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Fit", "Logger", "Metric", "Sink"]


class Metric(NamedTuple):
    """A number of a fit.

    Attributes:
        name: key of the record of an epoch, or `system/<node>/<name>`.
        value: may be NaN or infinite.
        step: epoch, counted from 1; seconds since the start of the training for what the system is asked.
        time: seconds since 1970.
    """

    name: str
    value: float
    step: int
    time: float


@dataclass(frozen=True)
class Fit:
    """A fit that begins.

    Attributes:
        run_id: name of its run in the store.
        params: texts by name, without secrets.
        tags: the same, of facts that are no Params.
        label: what distinguishes it from others of its estimator: "fold 2, batch_size=64"; "" for one alone.
        epochs_done: of an interrupted run that it goes on with.
    """

    run_id: str
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    epochs_done: int = 0


class Sink:
    """Place of one fit's numbers; its methods run in one background thread, in order, and may fail: then they are called again.

    Attributes:
        place: in words, for messages.
    """

    place = "the logger"

    def start(self) -> None:
        """Open the place; first of all calls."""

    def log(self, metrics: Sequence[Metric]) -> None:
        """Write numbers, at most 1,000."""
        raise NotImplementedError

    def log_model(self, model: Any) -> None:
        """Write the trained `TorchModel`."""

    def finish(self, state: str, files: Mapping[str, bytes]) -> None:
        """End the fit; last of all calls.

        Args:
            state: "finished", "failed" or "interrupted".
            files: report of the fit by name; {} if there is none.
        """

    def is_refused(self, error: Exception) -> bool:
        """Return True if another try would fail in the same way."""
        return True


class Logger(abc.ABC):
    """Logger of fits: give `TorchEstimator(loggers=[...])` an instance of a subclass. It holds nothing of a fit, and can be copied and pickled.

    Attributes:
        patience_s: seconds that a fit waits at its end for numbers that are not delivered yet.
    """

    patience_s: float = 60.0

    def bound(self) -> Logger:
        """Return this logger with what belongs to the calling thread, for fits of a grid in other threads."""
        return self

    @abc.abstractmethod
    def begin(self, fit: Fit) -> Sink:
        """Make the place of a fit's numbers, in the thread that calls `fit`; asks no server."""
