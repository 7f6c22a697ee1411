"""Loggers and timeline of a fit of Keras: what the driver makes of the ranks' lines, and a callback that records the parts of steps.

Threads: the driver's stream is written by one thread at a time. Failure: see `observe.loggers` and `training.run_timeline`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, cast

from sparkhvd.keras.backend import keras
from sparkhvd.observe.loggers.followers import Followers
from sparkhvd.observe.loggers.logger import Metric
from sparkhvd.runner.metric_lines import LineSplitter
from sparkhvd.runner.rank_load import WithLoad
from sparkhvd.training.run_timeline import RunTimeline

__all__ = ["Following", "StepSpans"]


class Following:
    """Way from the ranks to the loggers of a fit."""

    def __init__(self, followers: Followers, epochs_done: int) -> None:
        """Begin without epochs.

        Args:
            followers: the loggers.
            epochs_done: of a run that this fit goes on with.
        """
        self.followers = followers
        self._done = epochs_done
        self._seen: set[int] = set()

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that ranks call: with loggers it tells their load."""
        return WithLoad(fn) if self.followers.has_loggers else fn

    def stream(self, given: TextIO | None, verbose: int) -> TextIO | None:
        """Return the stream for the ranks' output.

        Args:
            given: the user's.
            verbose: 0 shows nothing where there is none.
        """
        if not self.followers.has_loggers:
            return given
        rest = sys.stderr if given is None and verbose else given
        return cast("TextIO", LineSplitter(self._take, rest))

    def _take(self, metrics: Sequence[Metric]) -> None:
        self._seen |= {m.step for m in metrics if not m.name.startswith("system/")}
        self.followers.put(metrics)

    def ended(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Log the epochs that did not come while the ranks ran, such as those of a backend of the user's."""
        for record in history:
            epoch = record["epoch"] + 1
            if epoch > self._done and epoch not in self._seen:
                self.followers.epoch({**record, "epoch": epoch})


class StepSpans(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Callback that records the parts of each step, until the timeline ends; every rank must have it, as the first of its callbacks."""

    def __init__(self, timeline: RunTimeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._part_ns = self._step_ns = time.monotonic_ns()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin the first step of an epoch."""
        self._step_ns = time.monotonic_ns()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin a step's computing."""
        self._part_ns = time.monotonic_ns()
        self.model.optimizer.watch_parts(self._end_part)

    def _end_part(self, name: str) -> None:
        now = time.monotonic_ns()
        self._timeline.spans.add(name, self._part_ns, now)
        self._part_ns = now

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End a step."""
        now = time.monotonic_ns()
        self._timeline.spans.add("step", self._step_ns, now)
        self._step_ns = now
        self._timeline.step()
