"""Where the time of a training goes: on this rank by phase, on all ranks by epoch. The fit's report shows it.

It costs two readings of a clock per step, a thread that reads the load of the process once per second, and per epoch one allgather of about a
hundred numbers of each rank, and of these readings.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.observe.system import Sample, Sampler
from sparkhvd.training.run_timeline import RunTimeline
from sparkhvd.training.waits import waits

__all__ = ["Profile"]

# Times of steps are counted in bins: from 16 us on, four to a factor of two, to nine minutes.
_FIRST_S, _PER_OCTAVE, _NUM_BINS = 16e-6, 4, 100
# With more, every second of the epochs is left out: the file is written anew after each.
_MOST_EPOCHS = 200
# Numbers of a rank and an epoch, before the bins; after them are the number of samples of the load, and these.
_NUMBERS = ("gradient_wait_s", "data_wait_s", "seconds", "rows")
_HEAD, _WIDTH = len(_NUMBERS) + _NUM_BINS + 1, len(Sample._fields)
# Samples of a rank that are kept; beyond, every second one of the older half goes.
_MOST_SAMPLES = 240


class Profile:
    """Times of a training; every rank has one, and those of all ranks after each epoch.

    Attributes:
        phases: seconds of this rank in this launch: "connect", "load", "first step", "train" (with that), "validate", "checkpoint".
        timeline: of the first steps, if there is one.
        sampler: of this process.
        generations: [{"attempt", "generation", "epoch", "repeated_rows"}] of ranks that come and go: where each set of them began.
    """

    def __init__(self, timeline: RunTimeline | None = None) -> None:
        """Start without epochs."""
        self.phases: dict[str, float] = {}
        self.timeline = timeline or RunTimeline()
        self.spans = self.timeline.spans
        self._epochs: list[dict[str, Any]] = []
        self._every = 1  # epochs of which one is kept
        self._steps = torch.zeros(_NUM_BINS, dtype=torch.float64)  # of all ranks
        self._own = [0] * _NUM_BINS  # of this rank, in this epoch
        self._began = time.perf_counter()
        self.sampler = Sampler()
        self.generations: list[dict[str, int]] = []
        self._hosts: list[str] = []  # by rank
        self._samples: list[list[list[float]]] = []  # by rank

    def resume(self, saved: Mapping[str, Any], num_epochs: int) -> None:
        """Go on behind the first epochs of a `state` that an interrupted run has left; {} if it left none."""
        self.generations = list(saved.get("generations", ()))
        if len(counts := saved.get("steps", {}).get("counts", ())) == _NUM_BINS:
            self._steps = torch.tensor(counts, dtype=torch.float64)
            self._every = saved.get("every", 1)
            self._epochs = [e for e in saved.get("epochs", ()) if e["epoch"] <= num_epochs]

    def meet_others(self) -> None:
        """Begin anew with the load of ranks, which are others now; every rank must call this."""
        self._hosts, self._samples = [], []

    def lap(self, name: str) -> None:
        """End a phase that began with the one before, or with this object."""
        now, now_ns = time.perf_counter(), time.monotonic_ns()
        seconds, self._began = now - self._began, now
        self.phases[name] = seconds
        self.spans.add(name, now_ns - int(seconds * 1e9), now_ns)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        began = time.perf_counter()
        try:
            with self.spans.span(name):
                yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def begin_epoch(self) -> None:
        """Begin to time steps."""
        self._own = [0] * _NUM_BINS
        self._began = time.perf_counter()

    def step(self) -> None:
        """Count the step that ends now, with its waits, and with what came between it and the one before."""
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
        """Gather the times of an epoch; every rank must call it.

        Args:
            epoch: counted from 1.
            rows: of this rank.
            seconds: of this rank's steps.
            data_wait_s: of these, waiting for batches; NaN if it is not known.
            gradient_wait_s: the same for reduced gradients.

        Returns:
            What the ranks waited for, see `waits`.
        """
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
        """Return the numbers of every rank, a row of each, and note the samples of its load."""
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
        """Return what a run that goes on needs, as JSON values: epochs, and steps of all ranks by duration; and the load of ranks."""
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
        """Return the state with counters, phases and device of every rank, on rank 0; {} on others. Every rank must call it.

        Args:
            device: of this rank.
            buckets: of gradients, equal on all ranks.
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
    """Return samples by the name of the number; None where a number is not known."""
    columns = zip(*samples, strict=True) if samples else ((),) * _WIDTH
    return {
        name: [None if math.isnan(value) else round(value, 3) for value in column]
        for name, column in zip(Sample._fields, columns, strict=True)
    }
