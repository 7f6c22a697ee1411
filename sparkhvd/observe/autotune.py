"""Find the fastest settings during training.

`Search` chooses the settings to try next by the speeds of earlier settings, without a clock or an engine. `Tuner`
counts steps, measures speeds, and changes the settings of all ranks between the same two operations: rank 0 decides,
and broadcasts its decision as an operation in the common order of all ranks.

Only knobs that cannot change the bits of results are tuned, unless `autotune="all"` allows all knobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkhvd.engine.calls import TensorView
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import DType
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.wire import read_json, rebuild

_FORMAT = 1
_ENGINE_KNOBS = ("chunk_bytes", "streams")
# With more hosts than this, allreduce uses a ring (native/src/communicator.cc).
_DIRECT_RANKS = 16


@dataclass(frozen=True)
class TunedKnob:
    """Tunable setting.

    Attributes:
        name: name of the setting.
        values: candidate values, ascending.
        start: initial value, which is in `values`.
    """

    name: str
    values: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if self.start not in self.values or list(self.values) != sorted(set(self.values)):
            raise InvalidArgumentError(
                f"Knob({self.name!r}): values are {self.values} and start is {self.start}; values must ascend "
                "and contain the start."
            )

    @classmethod
    def powers(cls, name: str, start: int, *, low: int, high: int) -> TunedKnob:
        """Make a knob with `start` and the powers of two from `low` to `high` as values."""
        values = {1 << p for p in range(low.bit_length() - 1, high.bit_length())}
        return cls(name, tuple(sorted({v for v in values if low <= v <= high} | {start})), start)


class Search:
    """Coordinate descent on a grid, one knob and one step at a time, robust to noise.

    A candidate is measured alternately with the best settings so far (best, candidate, best, candidate, ...), so that a
    temporary slowdown of the machine affects both. It replaces the best settings if the median of its relative speeds
    is more than `gain` above 1. It is dropped after two pairs if it is clearly slower. Moves by two steps of the grid
    are tried before moves by one step, so that a plateau does not end the search. When no move of any knob helps, the
    best settings are compared with the start again, in case noise has chosen them.
    """

    def __init__(
        self,
        knobs: Sequence[TunedKnob],
        *,
        repeats: int = 3,
        gain: float = 0.02,
        hopeless: float = 0.15,
        max_windows: int = 400,
    ) -> None:
        self.knobs = tuple(knobs)
        self.windows = 0
        self._repeats = repeats
        self._gain = gain
        self._hopeless = hopeless
        self._max_windows = max_windows
        self._best = [knob.values.index(knob.start) for knob in knobs]
        self._best_speeds: list[float] = []
        self._first_speed: float | None = None
        self._failed = 0  # number of moves since the last move that helped
        self._moves = [
            (number, stride * sign)
            for number in range(len(knobs))
            for stride in (2, 1)
            for sign in (1, -1)
        ]
        self._move = 0
        self._start = list(self._best)
        self._meets_start = False
        self._candidate: list[int] | None = None
        self._pairs: list[float] = []
        self._tries_candidate = False
        self._advance()

    @property
    def done(self) -> bool:
        """True if the search has ended. Its result is `best`."""
        return self._candidate is None

    @property
    def best(self) -> dict[str, int]:
        """Fastest settings so far."""
        return self._values(self._best)

    @property
    def choice(self) -> dict[str, int]:
        """Settings to measure in the next window."""
        if self._tries_candidate and self._candidate is not None:
            return self._values(self._candidate)
        return self.best

    @property
    def speedup(self) -> float:
        """Measured speed of `best` relative to the start."""
        if not self._best_speeds or not self._first_speed:
            return 1.0
        return statistics.median(self._best_speeds) / self._first_speed

    def report(self, speed: float) -> None:
        """Record the speed of a window with `choice`. Higher is better."""
        if self._candidate is None:
            return
        self.windows += 1
        if not self._tries_candidate:
            self._best_speeds = [*self._best_speeds[-8:], speed]
            if self._first_speed is None:
                self._first_speed = speed
            self._tries_candidate = True
            return
        self._tries_candidate = False
        before = self._best_speeds[-1]
        self._pairs.append(speed / before if before > 0 else math.inf)
        # In the last comparison the start wins unless it is slower; in other comparisons the candidate must be faster.
        least = 1 - self._gain if self._meets_start else 1 + self._gain
        if len(self._pairs) == 2 and max(self._pairs) < 1 - self._hopeless:
            self._judge(speed, helps=False)
        elif len(self._pairs) == self._repeats:
            self._judge(speed, helps=statistics.median(self._pairs) > least)
        if self.windows >= self._max_windows:
            self._candidate = None

    def _judge(self, speed: float, *, helps: bool) -> None:
        assert self._candidate is not None
        if helps:
            self._best, self._best_speeds = self._candidate, [speed]
            self._failed = 0
            if self._meets_start:
                self._first_speed, self._candidate = speed, None
                return
        else:
            self._failed += 1
            self._move = (self._move + 1) % len(self._moves)
        self._advance()

    def _advance(self) -> None:
        """Choose the next candidate. A move is repeated as long as it helps."""
        self._pairs = []
        self._candidate = None
        while self._failed < len(self._moves):
            number, step = self._moves[self._move]
            place = self._best[number] + step
            if 0 <= place < len(self.knobs[number].values):
                self._candidate = list(self._best)
                self._candidate[number] = place
                return
            self._failed += 1
            self._move = (self._move + 1) % len(self._moves)
        if self._best != self._start and not self._meets_start:
            self._meets_start = True
            self._candidate = list(self._start)

    def _values(self, places: Sequence[int]) -> dict[str, int]:
        return {
            knob.name: knob.values[place] for knob, place in zip(self.knobs, places, strict=True)
        }


class Tuner:
    """Tuner of the engine's settings during training. Every rank must call `step` between the same steps.

    Args:
        engine: engine of this rank; its setting `autotune_file` names the file of the chosen settings.
        knobs: knobs, equal on every rank; all have their start values now.
        apply: function that applies settings outside the engine, called with all knobs between the same steps on every
            rank.
        measure: function that returns the bytes reduced so far; None reads the engine's counter.
        warmup_steps: steps at the beginning of each window that are not measured, so that a change takes effect.
        window_steps: measured steps of each window.
        seconds: function that reads the clock in s.
    """

    def __init__(
        self,
        engine: Engine,
        knobs: Sequence[TunedKnob],
        apply: Callable[[Mapping[str, int]], None],
        measure: Callable[[], int] | None = None,
        *,
        warmup_steps: int = 2,
        window_steps: int = 10,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._apply = apply
        self._measure = measure or self._reduced_bytes
        self._warmup_steps = warmup_steps
        self._window_steps = window_steps
        self._seconds = seconds
        self._file = engine.settings.autotune_file
        self._search = Search(knobs)  # only rank 0 uses it
        self._values = self._search.best
        self._is_loaded = False
        self._number = 0
        self._steps = 0
        self._began: tuple[float, int] | None = None
        self.is_done = engine.size == 1 or self._search.done

    @property
    def values(self) -> dict[str, int]:
        """Settings in effect."""
        return dict(self._values)

    def step(self) -> None:
        """Count a training step, and after a window measure the speed and change the settings.

        The call comes after all gradients are reduced.
        """
        if self.is_done:
            return
        if self._number == 0:  # load a saved choice before the first measurement
            self._decide()
            return
        self._steps += 1
        if self._steps == self._warmup_steps:
            self._began = (self._seconds(), self._measure())
        elif self._steps == self._warmup_steps + self._window_steps:
            if self._engine.rank == 0 and self._began is not None:
                elapsed = max(1e-9, self._seconds() - self._began[0])
                self._search.report((self._measure() - self._began[1]) / elapsed)
            self._decide()

    def _decide(self) -> None:
        """Broadcast rank 0's next settings, and apply them."""
        names = list(self._values)
        numbers = [0, *self._values.values()]
        if self._engine.rank == 0:
            loaded = self._load() if self._number == 0 else None
            is_done = loaded is not None or self._search.done
            self._is_loaded = loaded is not None
            chosen = loaded or (self._search.best if is_done else self._search.choice)
            numbers = [int(is_done), *(chosen[name] for name in names)]
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        address = ctypes.addressof(array)
        try:
            self._engine.broadcast(
                TensorView(address, address, (len(numbers),)),
                root_rank=0,
                name=f"sparkhvd.autotune.{self._number}",
                dtype=DType.INT64,
                keep=array,
            ).wait()
        except MismatchError as error:  # the set of ranks has changed: every rank gets this error
            self._notify(f"stopped, because not every rank takes part any more ({error})")
            self.is_done = True
            return
        self._number += 1
        self._steps = 0
        values = dict(zip(names, array[1:], strict=True))
        if values != self._values:
            self._apply(values)
            self._configure(values)
            self._values = values
        self.is_done = bool(array[0])
        if self.is_done and self._engine.rank == 0:
            self._conclude()

    def _configure(self, values: Mapping[str, int]) -> None:
        """Apply settings on all ranks at the same point, by an engine operation."""
        settings = {name: values[name] for name in _ENGINE_KNOBS if name in values}
        if settings:
            self._engine.configure(**settings).wait()

    def _reduced_bytes(self) -> int:
        entries = self._engine.counters()["collectives"]
        return sum(entry["bytes"] for entry in entries if entry["collective"] == "allreduce")

    def _conclude(self) -> None:
        shown = ", ".join(f"{name}={value}" for name, value in self._values.items())
        if self._is_loaded:
            self._notify(f"{shown}, loaded from {self._file}")
            return
        speedup, windows = self._search.speedup, self._search.windows
        self._notify(
            f"chose {shown}, {speedup:.2f} times the speed of before, in {windows} windows"
        )
        if self._file:
            try:
                self._save()
            except OSError as error:
                self._notify(f"could not save its choice: {error}")

    def _notify(self, text: str) -> None:
        if self._engine.rank == 0:
            # A closed stderr must not stop the training.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"sparkhvd autotune: {text}.\n")

    # --- The file. ---

    def _save(self) -> None:
        target = Path(self._file).resolve()
        content = {
            "format": _FORMAT,
            "world": self._world(),
            "choice": self._values,
            "speedup": round(self._search.speedup, 3),
        }
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "w") as file:
                file.write(json.dumps(content, indent=2) + "\n")
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise

    def _load(self) -> dict[str, int] | None:
        """Load the choice of an earlier run with the same ranks and knobs, or return None without it."""
        if not self._file or not Path(self._file).exists():
            return None
        try:
            content: Any = read_json(Path(self._file).read_text())
            fits = content["format"] == _FORMAT and content["world"] == self._world()
            choice = rebuild(dict[str, int], content["choice"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._notify(f"{self._file} is not a file of autotune ({error!r}); tuning again")
            return None
        for knob in self._search.knobs:
            low, high = knob.values[0], knob.values[-1]
            fits = fits and low <= choice.get(knob.name, low - 1) <= high
        if not fits or len(choice) != len(self._values):
            self._notify(f"{self._file} was made for other ranks or knobs; tuning again")
            return None
        return choice

    def _world(self) -> dict[str, int]:
        topology = self._engine.topology
        return {"ranks": topology.size, "local_ranks": topology.local_size}


def knobs(engine: Engine) -> list[TunedKnob]:
    """List the knobs allowed by the settings of these ranks."""
    settings, topology = engine.settings, engine.topology
    hosts = len(set(topology.hosts)) if settings.shared_memory else topology.size
    may_change_bits = settings.tuning == "all"
    tuned = []
    # In a ring, bucket and chunk sizes decide the order in which the values of an element are added, and so may change
    # bits.
    is_ring = hosts > _DIRECT_RANKS
    if not is_ring or may_change_bits:
        tuned.append(
            TunedKnob.powers("bucket_bytes", settings.bucket_bytes, low=1 << 20, high=64 << 20)
        )
    if hosts < topology.size and (not is_ring or may_change_bits):
        tuned.append(
            TunedKnob.powers(
                "chunk_bytes", settings.slot_bytes, low=32 << 10, high=settings.slot_bytes
            )
        )
    if hosts > 1 and settings.streams > 1:
        values = tuple(range(1, settings.streams + 1))
        tuned.append(TunedKnob("streams", values, settings.streams))
    return tuned
