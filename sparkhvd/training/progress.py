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
# Unchanged shares are reported again after so many seconds: a report may be lost, and that of a rank's first connection is.
_REPEAT_S = 5.0
# A report has the loss and so many metrics, fewer if their names are long: it must fit into one write to a pipe.
_MOST_MEANS, _MOST_BYTES = 9, 4000


class Progress:
    """Reports within an epoch: of rank 0 at most two per second, of others how long they wait, if that changes or was told long ago."""

    def __init__(self, epoch: int, epochs: int, num_steps: int) -> None:
        """Begin an epoch, counted from 1, of so many steps; 0 if that is not known."""
        self._epoch, self._epochs, self._num_steps = epoch, epochs, num_steps
        self._rank = hvd.rank()
        self._interval_s = _OTHERS_INTERVAL_S if self._rank else _INTERVAL_S
        self._began = self._reported = time.monotonic()
        self._rows = self._steps = 0
        self._last_share, self._told = math.nan, 0.0

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
                "size": hvd.size(),
                "epochs": self._epochs,
                "step": number,
                "num_steps": self._num_steps,
                "rows_per_s": self._rows / seconds,
                "left_s": max(0, self._num_steps - number) * seconds / self._steps,
                "means": dict(itertools.islice(means().items(), 1 + _MOST_MEANS)),
            }
        elif abs(share - self._last_share) < _CHANGE and now - self._told < _REPEAT_S:
            return
        self._last_share, self._told = share, now
        text = json.dumps(report)
        while len(text) > _MOST_BYTES and report["means"]:
            report["means"].popitem()
            text = json.dumps(report)
        report_progress(text)
