"""Writing of checkpoints while training continues.

Threads: rank 0 starts a background thread for each write, and only one runs at a time. Training waits for the copy of
the state, not for the store. Where records are appended to the metrics file, the training thread writes them, so a
checkpoint of the thread refers to records that are in the file. Ownership: the thread owns its copy and the run's
checkpoint folder. Shutdown: the end of the block waits for the current write, also after an error, so that no
checkpoint is lost. If the store hangs, the wait ends after `WRITE_LIMIT_S`. After an error it also writes the copy of
the best epoch, if that is not written yet, and waits `_BEST_LIMIT_S` for it. The thread is a daemon, so it does not
keep the process alive.
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

# Shortest time between two writes of the profile, after the first epochs.
_PROFILE_S = 10.0
# Longest wait for a write; by default other ranks wait this long for rank 0 (`Settings.stall_shutdown_s`).
WRITE_LIMIT_S = 1800.0
# Longest wait for the write of the best epoch after an error.
_BEST_LIMIT_S = 60.0

T = TypeVar("T")


class Saver:
    """Writer of a run's checkpoints, as a context manager on each rank."""

    def __init__(self, spec: TrainSpec, checkpoints: Checkpoints, state: TrainingState) -> None:
        """Prepare to save `state`, without writing yet."""
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
        # On rank 0 the copy of the best epoch if it is not written yet. On every rank the best value, and the number of
        # records compared for it.
        self._best: tuple[Checkpoint, list[str]] | None = None
        self._best_value: float | None = None
        self._num_compared = 0
        self._records = RecordCopies()
        self._profiled_at = -math.inf

    def after_step(
        self, history: History, step: int, totals: Totals | None, seconds: float
    ) -> None:
        """Take a checkpoint if it is due. All ranks must call this after every optimizer step.

        Args:
            history: the records of completed epochs.
            step: completed steps of this epoch.
            totals: this rank's totals of this epoch; None for a `train_fn`.
            seconds: duration of this epoch so far.
        """
        # An elastic fit has no such checkpoints, because they hold a state for each rank and the ranks may change.
        if self._spec.least_ranks or not self._is_due():
            return
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
        """Record the end of an epoch, and take a checkpoint if it is due or the epoch is the last. All ranks must call this.

        Not every short epoch has a checkpoint, see `Budget`. If `fit` returns the best epoch, the copy of a best epoch
        without a checkpoint is written with the next checkpoint.
        """
        with self._state.profile.phase("checkpoint"):
            is_best = self._is_best(history)
            try:
                # Write the records first, because the checkpoint refers to them.
                if self._is_writer and self.checkpoints.is_appended:
                    self.checkpoints.write_history(history)
            finally:  # an error above does not stop the checkpoint
                # Write the best epoch of an elastic fit now: its copy would be lost with rank 0, while other ranks
                # continue.
                must_write = is_last or (is_best and self._spec.least_ranks > 0)
                if must_write or self._is_epoch_due():
                    if is_best:
                        self._best = None
                    self._take(history)
                elif is_best:
                    self._best = None  # free the old copy before making the new copy
                    self._best = self._taken(history)

    def save(self, history: History) -> None:
        """Take the checkpoint of an epoch. All ranks must call this, and rank 0 writes."""
        with self._state.profile.phase("checkpoint"):
            self._take(history)

    def _is_epoch_due(self) -> bool:
        """Decide on rank 0 whether to take a checkpoint of this epoch."""
        callbacks = self._state.callbacks
        if self._spec.num_checkpoints > 1 or (callbacks is not None and callbacks.see_checkpoints):
            return True
        answer = torch.zeros(1, dtype=torch.int64)
        if self._is_writer:
            answer[0] = self._budget.spend(time.monotonic())
        return bool(hvd.broadcast(answer, 0, name="checkpoint.epoch").item())

    def _is_best(self, history: History) -> bool:
        """Check whether the last epoch is the best and `fit` returns the best epoch.

        The result is the same on all ranks.
        """
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
        """Add callbacks' changes in the block to the last checkpoint. All ranks must enter it.

        They are stored separately (`Checkpoint.final`), because a resumed run calls the callbacks again.
        """
        taken = self._taken(history)
        yield
        if taken is None:
            return
        checkpoint, left_out = taken
        weights = self._changed(checkpoint.model, left_out)
        if weights and self._spec.return_best:
            self.checkpoints.note(
                "A callback changed the model's weights in on_train_end, but return_model='best' returns the weights of the best epoch "
                "without this change. Change the weights in on_epoch_end, or set return_model='last'."
            )
        if self._spec.return_best:
            return
        final = {"model": snapshot(weights), **snapshot(self._state.beside_weights())}
        before = {name: getattr(checkpoint, name) for name in final}
        before["changes"] = of_rank_0(checkpoint.changes)
        if weights or not is_same(before, {**final, "model": checkpoint.model}):
            self._save([(replace(checkpoint, final=final), left_out)])

    def _changed(self, before: State, left_out: list[str]) -> State:
        """Find the changed entries of the model's state dict.

        If its names or shapes differ, add a note and return {}.
        """
        after, still_left_out = self._frozen.divide(self._state.model)
        shapes = [
            {n: getattr(value, "shape", None) for n, value in part.items()}
            for part in (before, after)
        ]
        names = [shapes[0].keys() | set(left_out), shapes[1].keys() | set(still_left_out)]
        if names[0] != names[1] or any(shapes[1].get(n, s) != s for n, s in shapes[0].items()):
            self.checkpoints.note(
                "A callback changed the names or shapes of the model's weights in on_train_end, so the returned model has the weights of "
                "the last epoch without these changes. Change the module that getModel() returns instead."
            )
            return {}
        return {n: v for n, v in after.items() if not is_same(before.get(n), v)}

    def _take(self, history: History, *, step: int = 0, ranks: Sequence[RankState] = ()) -> None:
        self.wait()  # wait before the next copy, so that only one copy is in memory
        if (taken := self._taken(history, step=step, ranks=ranks)) is not None:
            best, self._best = self._best, None
            self._save([each for each in (best, taken) if each is not None])

    def _taken(
        self, history: History, *, step: int = 0, ranks: Sequence[RankState] = ()
    ) -> tuple[Checkpoint, list[str]] | None:
        """Copy the state, and return the copy and the names of omitted frozen parameters.

        All ranks must call it; it returns None on ranks that do not write.
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
        # The gathered compression state needs no copy, because nothing else uses it.
        copied = {
            **snapshot(values),
            "history": self._records.of(history),
            "compression": compression,
        }
        return Checkpoint(**copied), left_out

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
        """Write copies of checkpoints in the background, in their order, after earlier writes. Empties the list."""
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
                self._write_copy(*copies.pop(0))  # `pop` frees each copy after its write
            self._cadence.written(time.monotonic() - taken)
            if profile is not None:
                with contextlib.suppress(StoreError):  # only the report would miss the profile
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

    def wait(self, limit_s: float = math.inf) -> str:
        """Wait until the last checkpoint is written and return its path on rank 0, else "".

        Raises:
            StoreError: the checkpoint was not written within `limit_s` or `WRITE_LIMIT_S`.
        """
        limit_s = min(limit_s, WRITE_LIMIT_S)
        writing, self._writing = self._writing, None
        if writing is not None:
            if futures.wait([writing], limit_s).not_done:
                raise StoreError(
                    f"The checkpoint {self._path} is not written after {limit_s:g} s: the store does not answer. "
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
        # After an error ignore errors of the write, which would hide it.
        with contextlib.suppress(*[] if error is None else [Exception]):
            self.wait()
            if error is not None and self._best is not None:
                best, self._best = self._best, None
                self._save([best])
                self.wait(_BEST_LIMIT_S)


def snapshot(value: T) -> T:
    """Copy the tensors in dicts, lists and tuples to the CPU, so that training cannot change them.

    Numpy numbers become plain numbers.
    """
    return cast("T", _snapshot(value))


def _snapshot(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        # `copy` keeps the class of the dict, and attributes that modules add.
        copied = copy.copy(value)
        for key, entry in value.items():
            copied[key] = _snapshot(entry)  # type: ignore[index]  # a copy of a state dict is mutable
        return copied
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(entry) for entry in value)
    if isinstance(value, np.generic):
        # numpy numbers, such as a rate of np.cos, cannot be read by torch.load with weights_only.
        return value.item()
    return copy.deepcopy(value)


class RecordCopies:
    """Copies of the records of a growing history.

    Each record is copied once, because a run may have thousands.
    """

    def __init__(self) -> None:
        self._copies: History = []

    def of(self, history: History) -> History:
        self._copies += snapshot(history[len(self._copies) :])
        return list(self._copies)


# ----------------------------------------------------------------------------------------------------
# Decisions about when to take a checkpoint, computed only from times that the caller passes.

# A checkpoint is taken after this share of the interval; the rest of the interval is for writing it.
_START = 0.75
_SHORTEST_STEP_S = 1e-6
# Largest and smallest number of questions to rank 0 per interval.
_MOST_QUESTIONS, _LEAST_QUESTIONS = 200, 20


class Cadence:
    """Decides on rank 0 when to take a checkpoint inside an epoch.

    A failure may lose at most `interval_s` of steps, so each write must end within the interval. Every few steps the
    ranks ask rank 0 whether to take a checkpoint. The number of steps between two questions follows from their
    duration.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        """Begin at `now`, before any training."""
        self._interval_s = interval_s
        self._taken = self._asked = now
        self._write_s = 0.0
        self._num_steps = 1

    def taken(self, now: float) -> None:
        """Record the start of a checkpoint of the state at `now`."""
        self._taken = now

    def written(self, seconds: float) -> None:
        """Record the seconds from taking a checkpoint to the end of its write."""
        # Lower the estimate slowly after a fast write.
        self._write_s = max(seconds, 0.7 * self._write_s)

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
        # Limit the growth of the number of steps to a factor of four, because steps may become slower.
        self._num_steps = max(1, min(int(pause / step_s), 4 * self._num_steps))
        return is_due, self._num_steps


class Budget:
    """Selection of the epochs with a checkpoint, made on rank 0.

    Every epoch of a second or more has a checkpoint. Of shorter epochs the first 16 have a checkpoint, later epochs one
    per 5 s.

    Args:
        interval_s: a failure may lose at most this many seconds.
        now: the time, on rank 0's clock.
    """

    BURST = 16
    _LONG_S, _SECONDS = 1.0, 5.0

    def __init__(self, interval_s: float, now: float) -> None:
        # Seconds per checkpoint of short epochs.
        self._seconds = min(self._SECONDS, _START * interval_s)
        self._left, self._at = float(self.BURST), now

    def spend(self, now: float) -> bool:
        """Decide at the end of an epoch whether to take a checkpoint."""
        seconds, self._at = now - self._at, now
        self._left = min(self.BURST, self._left + seconds / self._seconds)
        if seconds < self._LONG_S and self._left < 1:
            return False
        self._left = max(0.0, self._left - 1)
        return True
