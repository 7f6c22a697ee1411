"""Callbacks: the user's objects called by the training loop.

A callback is pickled with the model on the driver, so each rank has its own copy, and changes of the copy
stay on the rank. All ranks agree on stopping and on the record of an epoch once per epoch.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, SupportsFloat

import torch
from torch import nn

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.training.metrics import Logs, combined
from sparkhvd.training.modules.attributes import unreadable_type
from sparkhvd.training.types import History, Record, State
from sparkhvd.training.user_code.watch import Watch

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from sparkhvd.data.store.store import Store
    from sparkhvd.torch.optimizer.distributed import Distributed
    from sparkhvd.training.loss_state import LossState
    from sparkhvd.training.profile import Profile


# ----------------------------------------------------------------------------------------------------
# `ctx`: the view of a run for the user's functions and callbacks.


@dataclass
class TrainingClock:
    """Current epoch and step of a training. The loop advances them."""

    epoch: int = 0
    step: int = 0


class _Spec(Protocol):
    """Attributes of `TrainSpec` that this module uses."""

    @property
    def store(self) -> Store: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def epochs(self) -> int: ...


class _State(Protocol):
    """Attributes of `TrainingState` that this module uses."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Distributed | None: ...
    @property
    def scheduler(self) -> LRScheduler | None: ...
    @property
    def profile(self) -> Profile: ...


class Context:
    """Base of every `ctx`. Its attributes are only for reading.

    Attributes:
        rank: this process among `size`.
        size: number of ranks.
        model: the module in training, on `device`.
        optimizer: the distributed optimizer over its parameters.
        scheduler: the learning rate scheduler, or None.
        device: of the model.
        store: holds data, checkpoints and metrics of this run.
        run_dir: the run's folder in the store; write own files to `<run_dir>/user/`.
        epochs: total epochs to train.
        moment: epoch and step of the training; the loop moves it.
    """

    def __init__(self, spec: _Spec, state: _State, moment: TrainingClock) -> None:
        """Refer to the objects of a run."""
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.model: nn.Module = state.model
        self.optimizer = state.optimizer
        self.scheduler = state.scheduler
        parameter = next(iter(self.model.parameters()), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.store = spec.store
        self.run_dir = spec.run_dir
        self.epochs = spec.epochs
        self.moment = moment

    @property
    def epoch(self) -> int:
        """The running epoch, counted from 1 as in the history, or 0 before the first."""
        return self.moment.epoch

    @property
    def step(self) -> int:
        """The step of the optimizer, counted from 1 over all epochs, or 0 before the first."""
        return self.moment.step


# Methods that run outside of an epoch, where no record can take a logged number; with the text of the error.
_OUTSIDE = {
    "on_train_begin": "no epoch has begun. Log in on_epoch_begin",
    "on_checkpoint": "the record of the epoch is written already. Log in on_epoch_end, or write to ctx.store",
    "on_train_end": "all records are written already. Log in on_epoch_end, or write to ctx.store",
}


class CallbackContext(Context):
    """The `ctx` of callbacks: a `Context` that can log and stop."""

    def __init__(self, spec: _Spec, state: _State, moment: TrainingClock) -> None:
        """Begin without numbers and without a request to stop."""
        super().__init__(spec, state, moment)
        self.logs = Logs()
        self.stop_reason = ""  # reason that this rank's callback gave for stopping
        self.method = ""  # the callback method that runs now
        self._profile = state.profile

    def log(self, name: str, value: SupportsFloat) -> None:
        """Log a number. The epoch's record gets the mean over all calls on all ranks.

        Raises:
            InvalidArgumentError: the name is reserved, the value is not one number, or no epoch is running.
        """
        if self.method in _OUTSIDE:
            raise InvalidArgumentError(
                f"ctx.log({name!r}, ...) in {self.method}: {_OUTSIDE[self.method]}."
            )
        self.logs.add(name, value, 1.0)

    def stop_training(self, reason: str = "a callback asked for it") -> None:
        """End the training after this epoch on all ranks. The request of one rank is enough.

        The epoch ends normally: with its validation, its record and its checkpoint.
        """
        self.stop_reason = str(reason) or "a callback asked for it"


# ----------------------------------------------------------------------------------------------------
# Callbacks and their calls.


class Callback:
    """Base of callbacks: override the methods you need.

    Every method is called on every rank, or with `ranks = 0` on rank 0 only. Collectives of `sparkhvd.torch` may be
    called from a callback that runs on every rank, never with `ranks = 0`. An exception ends the fit and names
    the callback.

    If the class has `state_dict()` and `load_state_dict(state)`, rank 0's state is part of the checkpoints, and a
    resumed run loads it on every rank. It may hold numbers, texts, lists, dicts and tensors.

    Attributes:
        ranks: "all", or 0 for a call on rank 0 only; set it on the class or the object.
    """

    ranks: Literal["all", 0] = "all"

    def on_train_begin(self, ctx: CallbackContext) -> None:
        """Run once, when model, optimizer and data are ready.

        In a resumed run it runs after the state is loaded. The run loads the checkpoint again afterwards, so changes of
        weights and states are not applied twice.
        """

    def on_epoch_begin(self, ctx: CallbackContext) -> None:
        """Run before the first step of an epoch, and again when a run resumes inside one.

        Random generators are seeded for the epoch, so a resumed run draws the same numbers.
        """

    def on_step_end(self, ctx: CallbackContext, loss: float | None) -> None:
        """Run after each training step. `loss`: mean over this rank's rows, None without rows."""

    def on_validation_end(self, ctx: CallbackContext, record: Record) -> None:
        """Run after the validation of an epoch, if the fit validates.

        `record` is the same as in `on_epoch_end`.
        """

    def on_epoch_end(self, ctx: CallbackContext, record: Record) -> None:
        """Run after training and validation of an epoch, before its checkpoint.

        `record` becomes the entry of the history and may be changed. Rank 0's is used on all ranks, also by the scheduler
        and the choice of the best epoch. Added values must be numbers or texts.
        """

    def on_checkpoint(self, ctx: CallbackContext, path: str) -> None:
        """Run after the epoch's checkpoint has been written. `path` is relative to `ctx.store`.

        This method must not change the model's weights or the optimizer, because the checkpoint would not have the
        change.
        """

    def on_train_end(self, ctx: CallbackContext, history: History) -> None:
        """Run once at the end of training, also if a callback stopped it, but not after an error.

        With `return_model="last"`, `fit` returns rank 0's weights and buffers after this method, for example averages.
        With "best" it returns the weights validated in the best epoch, and warns if this method changed weights; change
        them in `on_epoch_end` instead. The checkpoint keeps the weights before and after, and a resumed run calls this
        method again.
        """


class Writer(Protocol):
    """Methods of `Saver` that this module uses."""

    def wait(self) -> str:
        """Wait for the last checkpoint, and return its path on the writing rank."""

    def around_train_end(self, history: History) -> AbstractContextManager[None]:
        """Add changes of the weights in the block to the last checkpoint."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Check the callbacks of a fit on the driver.

    Raises:
        InvalidArgumentError: an entry is not a `Callback` object, or has a method that is never called or that does not
            accept its arguments.
    """
    if callbacks is None:
        return ()
    entries = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    return tuple(_checked(f"callbacks[{index}]", entry) for index, entry in enumerate(entries))


def _checked(where: str, callback: object) -> Callback:
    if not isinstance(callback, Callback):
        hint = f" Give an object: {callback.__name__}()." if isinstance(callback, type) else ""
        raise InvalidArgumentError(
            f"{where} is {callback!r:.100}; it must be an object of a subclass of sparkhvd.estimator.Callback.{hint}"
        )
    name = type(callback).__name__
    if callback.ranks != "all" and (callback.ranks != 0 or isinstance(callback.ranks, bool)):
        raise InvalidArgumentError(
            f"{where} ({name}): ranks is {callback.ranks!r}; it must be 'all' or 0."
        )
    for method in dir(callback):
        if method.startswith("on_") and method not in HOOKS and callable(getattr(callback, method)):
            close = difflib.get_close_matches(method, HOOKS, n=1, cutoff=0.0)[0]
            raise InvalidArgumentError(
                f"{where} ({name}) has a method {method!r}, which is never called. Did you mean {close!r}? The "
                f"methods are: {', '.join(HOOKS)}."
            )
    for hook in HOOKS:
        expected = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        try:
            inspect.signature(getattr(callback, hook)).bind(*expected)
        except TypeError as e:
            raise InvalidArgumentError(
                f"{where} ({name}): {hook} must take ({', '.join(expected)}): {e}."
            ) from e
    if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
        raise InvalidArgumentError(
            f"{where} ({name}) has only one of state_dict and load_state_dict. Define both or neither."
        )
    return callback


class Callbacks:
    """Callbacks of a run on this rank."""

    def __init__(
        self, callbacks: Sequence[Callback], ctx: CallbackContext, others: LossState
    ) -> None:
        """Pass `ctx` to every method, and watch its changes of model and losses."""
        self._all = tuple(callbacks)
        self.ctx = ctx
        self._called = [c for c in self._all if c.ranks == "all" or hvd.rank() == 0]
        self.watch = Watch(ctx.model, ctx.optimizer, ctx.scheduler, others)
        # Why training ends after the current epoch; the same on all ranks, "" to continue.
        self.stopped = ""

    def call(self, hook: str, *values: object) -> None:
        """Call a method of every callback of this rank, in order.

        Raises:
            RuntimeError: a callback raised an error, which is the cause of this error; the message names the callback.
        """
        self.ctx.method = hook
        for callback in self._called:
            method = getattr(callback, hook)
            if getattr(method, "__func__", None) is not getattr(Callback, hook):
                with self._timed(hook), self.watch.during(callback, hook, self.ctx.epoch):
                    self._call(callback, hook, values)
        if hook == "on_epoch_begin":
            self.watch.check(self.ctx.epoch)

    def _call(self, callback: Callback, hook: str, values: Sequence[object]) -> None:
        try:
            getattr(callback, hook)(self.ctx, *values)
        except CollectiveError:
            raise  # another rank was lost, so the callback is not to blame
        except Exception as e:
            raise RuntimeError(
                f"The callback {type(callback).__name__} raised {type(e).__name__} in {hook}: {e}"
            ) from e

    def _timed(self, hook: str) -> AbstractContextManager[None]:
        """Time a method in the profile, unless the time belongs to a step."""
        if hook == "on_step_end":
            return contextlib.nullcontext()
        return self.ctx._profile.phase("callbacks")

    def has(self, hook: str) -> bool:
        """Whether a callback of this rank overrides a method."""
        return _overrides(hook, self._called)

    def step_end(self, loss_sum: torch.Tensor | float, weight: float) -> None:
        """Call `on_step_end` with this rank's mean loss. The arguments are the sums of weighted losses and of weights."""
        # Without it avoid reading the loss, which waits for the accelerator.
        if self.has("on_step_end"):
            self.call("on_step_end", float(loss_sum) / weight if weight else None)

    @property
    def see_checkpoints(self) -> bool:
        """Whether a callback overrides `on_checkpoint`, so that every epoch needs a checkpoint."""
        return _overrides("on_checkpoint", self._all)

    def checkpoint(self, saver: Writer) -> None:
        """Call `on_checkpoint` after the checkpoint of an epoch. Every rank must call it."""
        if self.see_checkpoints:
            with self.ctx._profile.phase("checkpoint"):
                path = saver.wait()  # wait for rank 0, which writes in the background
                path = hvd.broadcast_object(path, 0, name="callbacks.checkpoint")
            self.call("on_checkpoint", path)

    def train_end(self, history: History, saver: Writer) -> None:
        """Call `on_train_end`, and save changes it made to the model. Every rank must call this."""
        if _overrides("on_train_end", self._all):
            with saver.around_train_end(history):
                self.call("on_train_end", history)

    def epoch_end(self, record: Record) -> str:
        """Call the methods at the end of an epoch, and agree with all ranks. Every rank must call it.

        Args:
            record: record of the epoch; callbacks of this rank may extend it, and logged numbers of all ranks are
                added.

        Returns:
            The reason to stop, the same on all ranks; "" to continue.
        """
        if not self._all:
            return ""
        self.ctx.logs = Logs()  # start anew, because the numbers logged so far are in the record
        if "val_loss" in record:
            self.call("on_validation_end", record)
        self.call("on_epoch_end", record)
        if self.ctx.rank == 0:
            _check_record(record)
        request = (self.ctx.stop_reason, self.ctx.logs.sums())
        with self.ctx._profile.phase("exchange"):
            requests = hvd.allgather_object(request, name="callbacks")
        record |= combined([logs for _, logs in requests], "")
        self.stopped = next((reason for reason, _ in requests if reason), "")
        return self.stopped

    def state_dict(self) -> State:
        """Collect the states of the callbacks by position and class, and the reason to stop."""
        states = {
            _key(i, c): c.state_dict() for i, c in enumerate(self._all) if hasattr(c, "state_dict")
        }
        for key, state in states.items():
            if kind := unreadable_type(state):
                raise InvalidArgumentError(
                    f"The callback {key.partition(':')[2]} has a {kind} in its state_dict(), so a checkpoint with it could not "
                    "be read. A state may hold numbers, texts, lists, dicts and tensors."
                )
        return {**states, "stopped": self.stopped}

    def load_state_dict(self, state: State) -> None:
        """Load each callback's state from a checkpoint, if present."""
        self.stopped = str(state.get("stopped", ""))
        for i, callback in enumerate(self._all):
            is_called = any(callback is each for each in self._called)
            if is_called and (saved := state.get(_key(i, callback))) is not None:
                callback.load_state_dict(saved)  # type: ignore[attr-defined]  # its state_dict was saved


def _overrides(hook: str, callbacks: Sequence[Callback]) -> bool:
    return any(getattr(type(c), hook) is not getattr(Callback, hook) for c in callbacks)


def _key(index: int, callback: Callback) -> str:
    return f"{index}:{type(callback).__qualname__}"


def _check_record(record: Record) -> None:
    for name, entry in record.items():
        value: object = entry
        if hasattr(value, "item"):  # a numpy number, or a tensor with one element
            record[name] = value = value.item()
        if not isinstance(name, str) or not isinstance(value, (int, float, str, type(None))):
            raise InvalidArgumentError(
                f"on_epoch_end put {name!r}: {value!r:.100} into the record. Names must be texts, and values numbers or "
                "texts, because the history is saved as JSON."
            )
    if "epoch" not in record or "loss" not in record:
        raise InvalidArgumentError(
            "on_epoch_end removed 'epoch' or 'loss' from the record; these must stay."
        )
