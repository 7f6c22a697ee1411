"""Writing of checkpoints while training continues.

Threads: rank 0 has one background thread per write, one at a time; training waits for the copy of the state, not for
the store. Ownership: the thread owns its copy and the run's checkpoint folder. Shutdown: leaving the block
waits for the current write, also after an error, so that no checkpoint is lost. The wait for a hanging store ends after
`WRITE_LIMIT_S`, and a hanging daemon thread does not keep the process alive.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

import sparkhvd.torch as hvd
from sparkhvd.errors import StoreError
from sparkhvd.training.checkpoints.changes import of_rank_0
from sparkhvd.training.checkpoints.checkpoint import Checkpoint, RankState, gather_rank_states
from sparkhvd.training.checkpoints.files import Checkpoints, Choice
from sparkhvd.training.checkpoints.frozen import FrozenParameters
from sparkhvd.training.checkpoints.resume import TrainingState, capture, gather_compression
from sparkhvd.training.early_stopping import best_epoch
from sparkhvd.training.metrics import Totals
from sparkhvd.training.modules.attributes import is_same
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.types import History, State

# Between two writes of the profile, once the first epochs are over.
_PROFILE_S = 10.0
# The longest wait for a write; the other ranks wait for rank 0 as long by default (`Settings.stall_shutdown_s`).
WRITE_LIMIT_S = 1800.0

T = TypeVar("T")


class Saver:
    """Writer of a run's checkpoints; a context manager, one per rank."""

    def __init__(self, spec: TrainSpec, checkpoints: Checkpoints, state: TrainingState) -> None:
        """Prepare to save `state`; nothing is written yet."""
        self._spec = spec
        self.checkpoints = checkpoints
        self._state = state
        self._cadence = Cadence(spec.checkpoint_interval_s, time.monotonic())
        self._until_asked = 1
        self._is_writer = hvd.rank() == 0
        self._path = ""
        self._taken_at = time.monotonic()
        self._writing: Future[None] | None = None
        self._frozen = FrozenParameters()
        self._budget = Budget(spec.checkpoint_interval_s, self._taken_at)
        # The best epoch if it is not written yet, on rank 0; its value, and the records compared for it, on every rank.
        self._best: tuple[Checkpoint, list[str]] | None = None
        self._best_value: float | None = None
        self._num_compared = 0
        self._records: History = []  # copies
        self._profiled_at = -math.inf

    def after_step(
        self, history: History, step: int, totals: Totals | None, seconds: float
    ) -> None:
        """Take a checkpoint if one is due. All ranks must call it after every step of the optimizer.

        Args:
            history: the records of completed epochs.
            step: completed steps of this epoch.
            totals: of this epoch, on this rank; None for a `train_fn`.
            seconds: duration of this epoch so far.
        """
        if not self._is_due():
            return
        if totals is None:
            self._records = []  # as in `save`
        callbacks = self._state.callbacks
        if callbacks is not None:
            callbacks.watch.check(callbacks.ctx.moment.epoch)
        stop_reason = callbacks.ctx.stop_reason if callbacks is not None else ""
        sums = None if totals is None else totals.state_dict()
        own = self._state.others.rank_state()
        ranks = gather_rank_states(
            self._state.model, sums, seconds, stop_reason=stop_reason, others=own
        )
        self._take(history, step=step, ranks=ranks)

    def after_epoch(self, history: History, *, is_last: bool) -> None:
        """Record the end of an epoch, and take its checkpoint if it is the last or one is due. All ranks must call it.

        Not every short epoch has one, see `Budget`. Where `fit` returns the best epoch, a copy of the best one is written with the
        next checkpoint.
        """
        with self._state.profile.phase("checkpoint"):
            is_best = self._is_best(history)
            # Ranks of an elastic fit continue without rank 0, which has the copy.
            must_write = is_last or (is_best and self._spec.least_ranks > 0)
            if must_write or self._is_epoch_due():
                if is_best:
                    self._best = None
                self._take(history)
            elif is_best:
                self._best = None  # before the next copy
                self._best = self._taken(history)
            # After the copy, whose write an error here does not stop.
            if self._is_writer and self.checkpoints.is_appended:
                self.checkpoints.write_history(history)

    def save(self, history: History) -> None:
        """Take the checkpoint of an epoch. All ranks must call it; rank 0 writes."""
        with self._state.profile.phase("checkpoint"):
            self._records = []  # a custom loop may have changed them
            self._take(history)

    def _is_epoch_due(self) -> bool:
        """Whether this epoch has a checkpoint; rank 0 decides."""
        callbacks = self._state.callbacks
        if self._spec.num_checkpoints > 1 or (callbacks is not None and callbacks.see_checkpoints):
            return True
        answer = torch.zeros(1, dtype=torch.int64)
        if self._is_writer:
            answer[0] = self._budget.spend(time.monotonic())
        return bool(hvd.broadcast(answer, 0, name="checkpoint.epoch").item())

    def _is_best(self, history: History) -> bool:
        """Whether the last epoch is the best one and `fit` returns the best; equal on all ranks."""
        if not self._spec.return_best:
            return False
        is_best, monitor = False, self._spec.monitor
        for record in history[self._num_compared :]:
            value = monitor.value(record)
            if is_best := monitor.is_better(value, self._best_value):
                self._best_value = value
        self._num_compared = len(history)
        return is_best

    @contextlib.contextmanager
    def around_train_end(self, history: History) -> Iterator[None]:
        """Add the changes by callbacks inside the block to the last epoch's checkpoint. All ranks must enter it.

        The rest of the checkpoint is unchanged: a resumed run calls them again.
        """
        taken = self._taken(history)
        yield
        if taken is None:
            return
        checkpoint, left_out = taken
        weights = self._changed(checkpoint.model, left_out)
        if weights and self._spec.return_best:
            self.checkpoints.note(
                "A callback has changed the model's weights in on_train_end, and return_model='best' returns those of the best epoch, "
                "without the change. Change them in on_epoch_end, or set return_model='last'."
            )
        if self._spec.return_best:
            return
        final = {"model": snapshot(weights), **snapshot(self._state.beside_weights())}
        before = {name: getattr(checkpoint, name) for name in final}
        before["changes"] = of_rank_0(checkpoint.changes)
        if weights or not is_same(before, {**final, "model": checkpoint.model}):
            self._save([(replace(checkpoint, final=final), left_out)])

    def _changed(self, before: State, left_out: list[str]) -> State:
        """The changed entries of the model's state dict; {} with a note if its names or shapes differ."""
        after, still_left_out = self._frozen.divide(self._state.model)
        shapes = [
            {n: getattr(value, "shape", None) for n, value in part.items()}
            for part in (before, after)
        ]
        names = [shapes[0].keys() | set(left_out), shapes[1].keys() | set(still_left_out)]
        if names[0] != names[1] or any(shapes[1].get(n, s) != s for n, s in shapes[0].items()):
            self.checkpoints.note(
                "A callback has changed the names or shapes of the model's weights in on_train_end, so the model has those of the last epoch. "
                "Make such changes to what getModel() returns."
            )
            return {}
        return {n: v for n, v in after.items() if not is_same(before.get(n), v)}

    def _take(self, history: History, *, step: int = 0, ranks: Sequence[RankState] = ()) -> None:
        self.wait()  # before the copy: two would be in memory
        if (taken := self._taken(history, step=step, ranks=ranks)) is not None:
            best, self._best = self._best, None
            self._save([each for each in (best, taken) if each is not None])

    def _taken(
        self, history: History, *, step: int = 0, ranks: Sequence[RankState] = ()
    ) -> tuple[Checkpoint, list[str]] | None:
        """Copy the state; return the copy, and the names of its parameters in the file of frozen parameters.

        All ranks must call it; it returns None on ranks that write nothing.
        """
        compression = gather_compression(self._state.compression)
        kept: State = {name: each.state_dict() for name, each in self._state.kept.items()}
        own = self._state.changes.own_attributes(self._state.watch)
        attributes = hvd.allgather_object(own, name="checkpoint.attributes")
        if not self._is_writer:
            return None
        weights, left_out = self._frozen.divide(self._state.model)
        checkpoint = capture(
            self._spec,
            self._state,
            history,
            step,
            ranks,
            weights=weights,
            kept=kept,
            attributes=attributes,
        )
        values = {name: value for name, value in vars(checkpoint).items() if name != "history"}
        # The gathered compression state is used only here and needs no copy.
        copied = {**snapshot(values), "history": self._copied(history), "compression": compression}
        return Checkpoint(**copied), left_out

    def _copied(self, history: History) -> History:
        """Copy the records; only those since the last call, because a run may have thousands."""
        self._records += snapshot(history[len(self._records) :])
        return list(self._records)

    def _is_due(self) -> bool:
        self._until_asked -= 1
        if self._until_asked:
            return False
        answer = torch.zeros(2, dtype=torch.int64)
        if self._is_writer:
            is_writing = self._writing is not None and not self._writing.done()
            is_due, num_steps = self._cadence.ask(time.monotonic(), is_writing=is_writing)
            answer = torch.tensor([is_due, num_steps])
        is_due, self._until_asked = hvd.broadcast(answer, 0, name="checkpoint.ask").tolist()
        return bool(is_due)

    def _save(self, copies: list[tuple[Checkpoint, list[str]]]) -> None:
        """Write copies of checkpoints in the background, after earlier copies; the last is newest. Empties the list."""
        self.wait()
        self._taken_at = time.monotonic()
        self._cadence.taken(self._taken_at)
        newest = copies[-1][0]
        self._path = self.checkpoints.path(*newest.position)
        self._writing = Future()
        profile = None
        is_early = newest.epoch <= Budget.BURST or newest.epoch >= self._spec.epochs
        if not newest.step and (is_early or self._taken_at > self._profiled_at + _PROFILE_S):
            self._profiled_at = self._taken_at
            profile = self._state.profile.state()
        arguments = (self._writing, copies, self._taken_at, profile)
        threading.Thread(
            target=self._write, args=arguments, name="sparkhvd-checkpoint", daemon=True
        ).start()

    def _write(
        self,
        done: Future[None],
        copies: list[tuple[Checkpoint, list[str]]],
        taken: float,
        profile: Mapping[str, Any] | None,
    ) -> None:
        try:
            while copies:
                self._write_copy(*copies.pop(0))  # each is freed when it is written
            self._cadence.written(time.monotonic() - taken)
            if profile is not None:
                with contextlib.suppress(StoreError):  # only the report lacks it
                    self.checkpoints.write_profile(profile)
        except BaseException as e:  # noqa: BLE001 - raised by `wait`
            done.set_exception(e)
        else:
            done.set_result(None)

    def _write_copy(self, copied: Checkpoint, left_out: list[str]) -> None:
        frozen = self._frozen.record(left_out, self.checkpoints.write_frozen)
        keep: Choice | None = None
        if self._spec.return_best:
            keep = functools.partial(best_epoch, copied.history, self._spec.monitor)
        checkpoint = replace(copied, frozen=frozen)
        self.checkpoints.save(checkpoint, keep=keep, num_epochs=self._spec.num_checkpoints)

    def wait(self) -> str:
        """Wait until the last checkpoint is written; return its path on rank 0, else "".

        Raises:
            StoreError: it is not written in `WRITE_LIMIT_S`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            if futures.wait([writing], WRITE_LIMIT_S).not_done:
                raise StoreError(
                    f"The checkpoint {self._path} is not written after {WRITE_LIMIT_S:g} s: the store does not answer. "
                    "A fit with the same run_id resumes from the previous checkpoint."
                )
            writing.result()
        return self._path

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A second error would hide the first.
        with contextlib.suppress(*[] if error is None else [Exception]):
            self.wait()


def snapshot(value: T) -> T:
    """Copy the tensors in dicts, lists and tuples to the CPU, so that training cannot change them.

    Numpy numbers become plain numbers.
    """
    return cast("T", _snapshot(value))


def _snapshot(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = copy.copy(value)  # keeps the kind of dict, and the attributes that modules add
        for key, entry in value.items():
            copied[key] = _snapshot(entry)  # type: ignore[index]  # a copy of a state dict is mutable
        return copied
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(entry) for entry in value)
    if isinstance(value, np.generic):
        # numpy numbers, such as a rate of np.cos, cannot be read by torch.load with weights_only.
        return value.item()
    return copy.deepcopy(value)


# ----------------------------------------------------------------------------------------------------
# Times of checkpoints inside an epoch: pure arithmetic on the caller's clock.

# A checkpoint starts after this share of the interval; the rest is for writing it.
_START = 0.75
_SHORTEST_STEP_S = 1e-6
# Most and fewest questions to rank 0 per interval.
_MOST_QUESTIONS, _LEAST_QUESTIONS = 200, 20


class Cadence:
    """Rank 0's decisions to write. At most `interval_s` of steps may be lost, so a write must end within it.

    Every few steps the ranks ask rank 0 whether to write. The number of steps between questions follows from their duration.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        """Begin at `now`, before any training."""
        self._interval_s = interval_s
        self._taken = self._asked = now
        self._write_s = 0.0
        self._num_steps = 1

    def taken(self, now: float) -> None:
        """Record that a checkpoint with the state at `now` is being written."""
        self._taken = now

    def written(self, seconds: float) -> None:
        """Record that a checkpoint was written `seconds` after it was taken."""
        self._write_s = max(seconds, 0.7 * self._write_s)  # one fast write proves little

    def ask(self, now: float, *, is_writing: bool) -> tuple[bool, int]:
        """Decide whether to take a checkpoint now, and after how many steps to ask again.

        Args:
            now: the time, on rank 0's clock.
            is_writing: the previous checkpoint is still being written, so another has to wait.
        """
        step_s = max((now - self._asked) / self._num_steps, _SHORTEST_STEP_S)
        self._asked = now
        start = min(_START * self._interval_s, self._interval_s - 2 * self._write_s)
        left = self._taken + start - now
        shortest = self._interval_s / _MOST_QUESTIONS
        is_due = left <= shortest and not is_writing
        if is_due:
            left = start
        pause = min(max(left / 4, shortest), self._interval_s / _LEAST_QUESTIONS)
        # Steps may become slower: at most four times the measured number.
        self._num_steps = max(1, min(int(pause / step_s), 4 * self._num_steps))
        return is_due, self._num_steps


class Budget:
    """Decides on rank 0 which epochs have a checkpoint.

    Every epoch of a second or more has one; of shorter epochs the first 16, and then one per 5 s.

    Args:
        interval_s: at most so many seconds may be lost.
        now: the time, on rank 0's clock.
    """

    BURST = 16
    _LONG_S, _SECONDS = 1.0, 5.0

    def __init__(self, interval_s: float, now: float) -> None:
        self._seconds = min(self._SECONDS, _START * interval_s)  # per checkpoint
        self._left, self._at = float(self.BURST), now

    def spend(self, now: float) -> bool:
        """Whether the epoch that has ended now has a checkpoint."""
        seconds, self._at = now - self._at, now
        self._left = min(self.BURST, self._left + seconds / self._seconds)
        if seconds < self._LONG_S and self._left < 1:
            return False
        self._left = max(0.0, self._left - 1)
        return True
