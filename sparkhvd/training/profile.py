"""Times of a training for the fit's report: by phase on this rank, and by epoch on all ranks.

Cost: two clock readings per step, a thread that reads the load of the process once per second, and in each epoch an
allgather of about a hundred numbers and the load samples of each rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.data.store.store import TIMELINE_NAME, Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe import timeline
from sparkhvd.observe.system import LoadMonitor, Sample
from sparkhvd.observe.timeline import Spans
from sparkhvd.rank_messages import report_progress
from sparkhvd.torch.context import context
from sparkhvd.training.modules.weights import PIECE_BYTES

# ----------------------------------------------------------------------------------------------------
# Time that the ranks of an epoch waited for each other.


def waits(waited_s: Tensor) -> dict[str, float | int]:
    """Split the waiting time of an epoch into communication and waiting for slower ranks.

    The rank that is last at a reduction waits only for the communication. Other ranks also wait for this rank.

    Args:
        waited_s: (ranks,) seconds that each rank has waited for reduced gradients.

    Returns:
        "comm_wait_s": seconds of the rank with the shortest wait; "rank_wait_s": how much longer the longest wait was;
        "slowest_rank": the rank with the shortest wait.
    """
    least, most = float(waited_s.min()), float(waited_s.max())
    return {
        "comm_wait_s": least,
        "rank_wait_s": most - least,
        "slowest_rank": int(waited_s.argmin()),
    }


# ----------------------------------------------------------------------------------------------------
# Timeline of a run: the engine's operations and the loop's own work on all ranks, in a file in the run's folder.
#     runs/<run_id>/timeline.json    the first steps of the latest launch
# Failure: a training never fails because of its timeline. If the file cannot be written, rank 0 warns. After an error
# of a rank the file has only the events of rank 0's engine.


class RunTimeline:
    """Timeline of a rank's first steps. The timeline ends with the `with` block at the latest.

    Attributes:
        spans: this rank's records for the timeline.
    """

    def __init__(self, store: Store | None = None, run_dir: str = "", num_steps: int = 0) -> None:
        """Prepare a timeline of `num_steps` steps.

        `begin` starts the timeline. 0 steps disable it.
        """
        self.spans = Spans()
        self._store = store
        self._path = f"{run_dir}/{TIMELINE_NAME}"
        self._left = num_steps
        self._folder = ""  # local folder of rank 0's file, until the file is in the store
        self._is_open = False

    def begin(self) -> None:
        """Start the timeline, after `init`. Every rank must call this."""
        if not self._left:
            return
        engine = context().engine
        self._folder = tempfile.mkdtemp(prefix="sparkhvd-timeline-")
        path = Path(self._folder, TIMELINE_NAME)
        try:
            timeline.start(engine, path, all_ranks=True, spans=self.spans)
            self._is_open = True
        except InvalidArgumentError as e:  # on every rank
            self._give_up(str(e))

    def step(self) -> None:
        """Count a finished step, and end the timeline after the last. Every rank must call this after each step."""
        if self._is_open:
            self._left -= 1
            if not self._left:
                self.end()

    def end(self) -> None:
        """End the timeline, if any. Every rank must call it."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            timeline.stop(context().engine)
        except InvalidArgumentError as e:  # on every rank
            self._give_up(str(e))
        self._store_file()

    def _store_file(self) -> None:
        """Move rank 0's file into the run's folder."""
        if not self._folder:
            return
        engine = context().engine
        try:
            if engine.rank == 0 and self._store is not None:
                source = Path(self._folder, TIMELINE_NAME)
                with source.open("rb") as file, self._store.open_output(self._path) as sink:
                    shutil.copyfileobj(file, sink, PIECE_BYTES)
        except Exception as e:  # noqa: BLE001 - a run without its timeline
            self._give_up(str(e))
        self._remove()

    def _give_up(self, cause: str) -> None:
        self._remove()
        if context().engine.rank == 0:
            warnings.warn(f"There is no timeline of this run: {cause}", stacklevel=3)

    def _remove(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            shutil.rmtree(folder, ignore_errors=True)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Record forward passes and optimizer steps of a custom loop."""
        if not self._is_open:
            return
        spans, began = self.spans, {"forward": 0, "optimizer": 0}

        def start(name: str) -> None:
            began[name] = time.monotonic_ns()

        def record(name: str) -> None:
            spans.add(name, began[name], time.monotonic_ns())

        model.register_forward_pre_hook(lambda *_: start("forward"))
        model.register_forward_hook(lambda *_: record("forward"))
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: start("optimizer"))
            optimizer.register_step_post_hook(lambda *_: record("optimizer"))

    def __enter__(self) -> RunTimeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        elif self._is_open:
            # After an error do not communicate: other ranks may be gone, and a second error would hide it.
            self._is_open = False
            with contextlib.suppress(Exception):
                timeline.abandon(context().engine)
                self._store_file()
            self._remove()


# Bins of the histogram of step times: from 16 us up to nine minutes, with four bins per factor of two.
_FIRST_S, _PER_OCTAVE, _NUM_BINS = 16e-6, 4, 100
# Most epochs in the file. If there are more, every second epoch is dropped, because each epoch rewrites the whole file.
_MOST_EPOCHS = 200
# The first numbers that a rank sends for an epoch. The bins, the number of load samples, and the samples follow.
_NUMBERS = ("gradient_wait_s", "data_wait_s", "seconds", "rows")
_HEAD, _WIDTH = len(_NUMBERS) + _NUM_BINS + 1, len(Sample._fields)
# Number of samples kept per rank. If there are more, every second sample of the older half is dropped.
_MOST_SAMPLES = 240


# ----------------------------------------------------------------------------------------------------
# Times of a training.


class Profile:
    """Times of a training on this rank, and the times of all ranks after each epoch.

    Attributes:
        phases: seconds that this rank spent in this launch in "connect", "load", "first step", "train" (includes the
            first step), "validate", "exchange" (records and times of epochs), "callbacks" (except in steps), "checkpoint".
        timeline: timeline of the first steps, if any.
        sampler: sampler of this process's load.
        generations: for each set of ranks of an elastic job its start as {"attempt", "generation", "epoch",
            "repeated_rows"}.
    """

    def __init__(self, timeline: RunTimeline | None = None) -> None:
        """Start without epochs."""
        self.phases: dict[str, float] = {}
        self.timeline = timeline or RunTimeline()
        self.spans = self.timeline.spans
        self._epochs: list[dict[str, Any]] = []
        self._every = 1  # of this number of epochs one is kept
        self._steps = torch.zeros(_NUM_BINS, dtype=torch.float64)  # histogram of all ranks' steps
        self._own = [0] * _NUM_BINS  # histogram of this rank's steps in this epoch
        self._began = time.perf_counter()
        self.sampler = LoadMonitor()
        self.generations: list[dict[str, int]] = []
        self._hosts: list[str] = []  # by rank
        self._samples: list[list[list[float]]] = []  # by rank

    def resume(self, saved: Mapping[str, Any], num_epochs: int) -> None:
        """Continue from the `state` of an interrupted run, {} for a new run. A damaged state is ignored."""
        self.generations = list(saved.get("generations", ()))
        try:
            counts = torch.tensor(saved["steps"]["counts"], dtype=torch.float64)
            epochs = [e for e in saved["epochs"] if e["epoch"] <= num_epochs]
            every = int(saved["every"])
        except (KeyError, TypeError, ValueError):
            return  # the profile is only for a report, so the training continues without it
        if counts.shape == (_NUM_BINS,) and every > 0:
            self._steps, self._every, self._epochs = counts, every, epochs

    def meet_others(self) -> None:
        """Reset the loads of the ranks after a change of the ranks. Every rank must call this."""
        self._hosts, self._samples = [], []

    def lap(self, name: str) -> None:
        """End the phase since the last call of `lap`, or since the creation of this object."""
        now, now_ns = time.perf_counter(), time.monotonic_ns()
        seconds, self._began = now - self._began, now
        self.phases[name] = seconds
        self.spans.add(name, now_ns - int(seconds * 1e9), now_ns)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of a block to a phase."""
        began = time.perf_counter()
        try:
            with self.spans.span(name):
                yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def begin_epoch(self) -> None:
        """Start timing steps."""
        self._own = [0] * _NUM_BINS
        self._began = time.perf_counter()

    def step(self) -> None:
        """Count a step at its end, including its waits and the time since the previous step."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.phases.setdefault("first step", seconds)
        octaves = math.log2(max(seconds, _FIRST_S) / _FIRST_S)
        now_ns = time.monotonic_ns()
        self.spans.add("step", now_ns - int(seconds * 1e9), now_ns)
        self._own[min(int(octaves * _PER_OCTAVE), _NUM_BINS - 1)] += 1

    def end_epoch(
        self,
        epoch: int,
        *,
        rows: int,
        seconds: float,
        data_wait_s: float = math.nan,
        gradient_wait_s: float = math.nan,
    ) -> dict[str, float | int]:
        """Gather the times of an epoch. Every rank must call it.

        Args:
            epoch: the epoch, counted from 1.
            rows: rows of this rank.
            seconds: duration of this rank's steps.
            data_wait_s: part of `seconds` spent waiting for batches; NaN if unknown.
            gradient_wait_s: part of `seconds` spent waiting for reduced gradients; NaN if unknown.

        Returns:
            The result of `waits`.
        """
        with self.phase("exchange"):
            found = self._gather([gradient_wait_s, data_wait_s, seconds, rows])
        self._steps += found[:, len(_NUMBERS) : _HEAD - 1].sum(0)
        self.phases["train"] = self.phases.get("train", 0.0) + seconds
        if (epoch - 1) % self._every == 0:
            columns = found[:, : len(_NUMBERS)].T.tolist()
            rounded = [[round(value, 6) for value in column] for column in columns]
            self._epochs.append({"epoch": epoch, **dict(zip(_NUMBERS, rounded, strict=True))})
        if len(self._epochs) > _MOST_EPOCHS:
            self._every *= 2
            self._epochs = self._epochs[::2]
        return waits(found[:, 0])

    def _gather(self, own: Sequence[float]) -> torch.Tensor:
        """Gather the numbers of every rank, one row per rank, and record the ranks' load samples."""
        if not self._hosts:
            self._hosts = hvd.allgather_object(socket.gethostname(), name="profile.hosts")
            self._samples = [[] for _ in self._hosts]
        taken = self.sampler.take()
        samples = [number for sample in taken for number in sample]
        row = torch.tensor([*own, *self._own, len(taken), *samples], dtype=torch.float64)
        flat, rows = hvd.allgather(row, name="epoch.times"), []
        for kept in self._samples:
            rows.append(flat[:_HEAD])
            length = int(flat[_HEAD - 1]) * _WIDTH
            kept += flat[_HEAD : _HEAD + length].reshape(-1, _WIDTH).tolist()
            if len(kept) > _MOST_SAMPLES:
                half = len(kept) // 2
                kept[:half] = kept[:half:2]
            flat = flat[_HEAD + length :]
        return torch.stack(rows)

    def state(self) -> dict[str, Any]:
        """Encode the state for a resumed run as JSON values: epochs, step histogram, and loads of ranks."""
        counts = {"first_s": _FIRST_S, "per_octave": _PER_OCTAVE, "counts": self._steps.tolist()}
        load = [
            {"host": host, **_columns(samples)}
            for host, samples in zip(self._hosts, self._samples, strict=True)
        ]
        state = {"every": self._every, "epochs": list(self._epochs), "steps": counts, "load": load}
        return {**state, "generations": list(self.generations)} if self.generations else state

    def gather(
        self, device: torch.device, buckets: Sequence[Mapping[str, str | int]]
    ) -> dict[str, Any]:
        """Gather the state with counters, phases and device of every rank on rank 0. Every rank must call this.

        Args:
            device: device of this rank.
            buckets: buckets of gradients; the same on all ranks.

        Returns:
            The gathered state on rank 0; {} on other ranks.
        """
        counters = hvd.metrics(show=False).counters
        names = ("sent_bytes", "received_bytes", "shared_bytes", "stall_warnings")
        own = {
            "device": str(device),
            **{name: counters[name] for name in names},
            "phases": {name: round(seconds, 6) for name, seconds in self.phases.items()},
        }
        ranks = hvd.allgather_object(own, name="profile")
        if hvd.rank():
            return {}
        kept = [
            {name: value for name, value in entry.items() if name != "histogram"}
            for entry in counters["collectives"]
        ]
        return {**self.state(), "ranks": ranks, "collectives": kept, "buckets": list(buckets)}


def _columns(samples: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    """Convert the samples to one list per field of `Sample`, with None for unknown numbers."""
    columns = zip(*samples, strict=True) if samples else ((),) * _WIDTH
    return {
        name: [None if math.isnan(value) else round(value, 3) for value in column]
        for name, column in zip(Sample._fields, columns, strict=True)
    }


# ----------------------------------------------------------------------------------------------------
# Progress within an epoch, for the driver.

# Shortest time between two reports of rank 0.
_INTERVAL_S = 0.5
# Other ranks report when their share of waiting has changed by this much, at most once per interval.
_CHANGE, _OTHERS_INTERVAL_S = 0.05, 1.0
# An unchanged share is reported again after this time, because reports may be lost, as the first of a connection always
# is.
_REPEAT_S = 5.0
# A report has the loss and at most this many metrics, fewer if their names are long: it must fit into one pipe write.
_MOST_MEANS, _MOST_BYTES = 9, 4000


class StepReporter:
    """Reports progress within an epoch to the driver.

    Rank 0 reports at most twice per second. Other ranks report their share of waiting when it changes, or after some
    time.
    """

    def __init__(self, epoch: int, epochs: int, num_steps: int) -> None:
        """Begin an epoch, counted from 1. `num_steps` is 0 if the number of steps is unknown."""
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
            number: number of the step, from 1.
            num_rows: rows of all ranks in the step.
            means: returns "loss" and metrics of the epoch so far on this rank. It waits for the GPU, so it is called
                only for a report.
            waited_s: seconds of the epoch that this rank has waited for reduced gradients.
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
