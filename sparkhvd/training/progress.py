"""How far an epoch is, for the driver."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import sparkhvd.torch as hvd
from sparkhvd.rank_messages import report_progress

__all__ = ["Progress"]

# Seconds between two reports of rank 0.
_INTERVAL_S = 0.5
# Another rank reports that its share of waiting has changed by this much, at most once in so many seconds.
_CHANGE, _OTHERS_INTERVAL_S = 0.05, 1.0
# A report has the loss and so many metrics: it must fit into one write to a pipe.
_MOST_MEANS = 9


class Progress:
    """Reports within an epoch: of rank 0 at most two per second, of others how long they wait, if that changes."""

    def __init__(self, epoch: int, epochs: int, num_steps: int) -> None:
        """Begin an epoch, counted from 1, of so many steps; 0 if that is not known."""
        self._epoch, self._epochs, self._num_steps = epoch, epochs, num_steps
        self._rank = hvd.rank()
        self._interval_s = _OTHERS_INTERVAL_S if self._rank else _INTERVAL_S
        self._began = self._reported = time.monotonic()
        self._rows = self._steps = 0
        self._last_share = math.nan

    def step(
        self,
        number: int,
        num_rows: int,
        means: Callable[[], Mapping[str, float]],
        waited_s: float = 0.0,
    ) -> None:
        """Count a step.

        Args:
            number: of the step, from 1.
            num_rows: of all ranks in it.
            means: returns "loss" and metrics of the epoch on this rank. That waits for a GPU to be at this step, as often as there are reports.
            waited_s: seconds of the epoch in which this rank has waited for reduced gradients.
        """
        self._rows += num_rows
        self._steps += 1
        now = time.monotonic()
        if now - self._reported < self._interval_s:
            return
        self._reported = now
        seconds = now - self._began
        share = waited_s / seconds
        report: dict[str, Any] = {"rank": self._rank, "epoch": self._epoch, "waited": share}
        if self._rank == 0:
            report |= {
                "epochs": self._epochs,
                "step": number,
                "num_steps": self._num_steps,
                "rows_per_s": self._rows / seconds,
                "left_s": max(0, self._num_steps - number) * seconds / self._steps,
                "means": dict(itertools.islice(means().items(), 1 + _MOST_MEANS)),
            }
        elif abs(share - self._last_share) < _CHANGE:
            return
        self._last_share = share
        report_progress(json.dumps(report))
