"""Collect the state of training for a checkpoint, and restore it on all ranks."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.gradients.powersgd import PowerSGD
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.training.batches import Done
from sparkhvd.training.checkpoints.changes import Changes, set_changes
from sparkhvd.training.checkpoints.checkpoint import (
    Checkpoint,
    RankState,
    extra_states,
    load_buffers,
    load_extra_states,
    load_rng,
    unsaved_buffers,
)
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.frozen import broadcast_weights, unwritten
from sparkhvd.training.host_memory import release
from sparkhvd.training.loss_state import LossState
from sparkhvd.training.metrics import Totals, TotalsState
from sparkhvd.training.modules.attributes import Entry
from sparkhvd.training.profile import Profile
from sparkhvd.training.rank_sync import raise_on_all_ranks
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.types import Compression, History, State, Stateful
from sparkhvd.training.user_code.callbacks import Callbacks
from sparkhvd.training.user_code.watch import Watch
from sparkhvd.wire import read_json


@dataclass
class TrainingState:
    """Objects changed by training and saved in checkpoints.

    Attributes:
        model: the module.
        optimizer: the distributed optimizer; None if `train_fn` has its own optimizer.
        scheduler: scheduler of the learning rate, or None.
        scaler: scaler of the loss, for float16; otherwise None.
        callbacks: the user's callbacks, which may have states.
        compression: compression of gradients, which may have a state.
        kept: objects kept by a `train_fn`, by name.
        profile: times of the training, saved beside checkpoints.
        others: state of losses and metrics.
        changes: changes of model and optimizer since they were built.
    """

    model: nn.Module
    optimizer: Distributed | None
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    callbacks: Callbacks | None = None
    compression: Compression | None = None
    kept: dict[str, Stateful] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    others: LossState = field(default_factory=LossState)
    changes: Changes = field(init=False)

    def __post_init__(self) -> None:
        self.changes = Changes(self.model, self.optimizer, self.others)

    def beside_weights(self) -> State:
        """Collect this rank's state outside the model's state dict: buffers, changes and losses."""
        return {
            "buffers": unsaved_buffers(self.model),
            "changes": self.changes.for_result(self.watch),
            "others": self.others.state_dict(),
        }

    @property
    def watch(self) -> Watch | None:
        """The watch of the callbacks, or None before the callbacks exist."""
        return None if self.callbacks is None else self.callbacks.watch


class Resumed(TypedDict):
    """Part of a checkpoint sent by rank 0 to every rank, without model and optimizer tensors."""

    history: History
    step: int
    ranks: list[RankState]
    buffers: dict[str, Tensor]
    scheduler: State | None
    scaler: State | None
    callbacks: State | None
    extra: State
    kept: State
    changes: dict[str, Any]
    problem: str
    is_new: bool


@dataclass
class RunStart:
    """Initial state of a run, without the model's weights.

    Attributes:
        resumed: the part of the checkpoint for all ranks.
        optimizer: the optimizer's state; on rank 0 only.
        compression: the state of the gradient compression; on rank 0 only.
    """

    resumed: Resumed
    optimizer: State = field(default_factory=dict)
    compression: State = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """Completed epochs, and completed optimizer steps of the next epoch."""
        return len(self.resumed["history"]), self.resumed["step"]


@dataclass
class ResumePoint:
    """Epoch and step from which training continues.

    Attributes:
        history: the records of completed epochs.
        step: completed optimizer steps of the next epoch.
        rank_state: this rank's own state after that step; None at the beginning of an epoch.
        done: part of that epoch that was done before the ranks changed.
        sums: sums of the ranks that did it, on rank 0; None on other ranks.
        seconds: time they spent.
        sent: names of frozen parameters sent by rank 0.
        changes: loaded changes of model and optimizer, see `repeated`.
        callbacks: loaded states of the callbacks.
    """

    history: History
    step: int = 0
    rank_state: RankState | None = None
    done: Done = Done()
    sums: TotalsState | None = None
    seconds: float = 0.0
    sent: frozenset[str] = frozenset()
    changes: dict[str, Any] = field(default_factory=dict)
    callbacks: State | None = None

    @property
    def is_inside(self) -> bool:
        """Whether a part of the epoch is done."""
        return bool(self.step or self.done.steps)

    def begin(self, totals: Totals) -> float:
        """Restore random numbers and totals for a run resumed inside an epoch.

        Returns:
            The duration of the epoch so far in seconds.
        """
        if self.rank_state is None:
            if self.sums is not None:
                totals.load_state_dict(self.sums)
            return self.seconds
        load_rng(self.rank_state["rng"])
        assert self.rank_state["totals"] is not None
        totals.load_state_dict(self.rank_state["totals"])
        return self.rank_state["seconds"]


def find_start(
    spec: TrainSpec,
    checkpoints: Checkpoints,
    model: nn.Module,
    held: Checkpoint | None = None,
    others: LossState | None = None,
) -> RunStart:
    """Find the checkpoint or the initial weights, and load them into rank 0's model and into `others`.

    All ranks must call it before the optimizer is built. If rank 0 holds a checkpoint in memory, the store is not read.

    Raises:
        InvalidArgumentError: the checkpoint or the weights do not fit this run; on all ranks.
    """
    checkpoint: Checkpoint | None = None
    resumed: Resumed | None = None
    if hvd.rank() == 0:
        problem = ""
        try:
            if held is None:
                checkpoint = _load_start(spec, checkpoints, model, others or LossState())
            else:
                load_weights(model, held.model, "The state in memory does")
                (others or LossState()).load_state_dict(held.others, "The state in memory does")
                checkpoint = held
        except InvalidArgumentError as e:
            problem = str(e)
        resumed = _resumed(checkpoint, extra_states(model), problem)
    resumed = cast("Resumed", hvd.broadcast_object(resumed, 0, name="resume"))
    if resumed["problem"]:
        raise_on_all_ranks(resumed["problem"])
    if checkpoint is None:
        return RunStart(resumed)
    return RunStart(resumed, checkpoint.optimizer, checkpoint.compression)


def _resumed(checkpoint: Checkpoint | None, extra: State, problem: str) -> Resumed:
    source = checkpoint or Checkpoint(0, {}, {}, None, [], "")
    return {
        "history": source.history,
        "step": source.step,
        "ranks": source.ranks,
        "buffers": source.buffers,
        "scheduler": source.scheduler,
        "scaler": source.scaler,
        "callbacks": source.callbacks,
        "extra": extra,
        "kept": source.kept,
        "changes": source.changes,
        "problem": problem,
        "is_new": checkpoint is None,
    }


def _load_start(
    spec: TrainSpec, checkpoints: Checkpoints, model: nn.Module, others: LossState
) -> Checkpoint | None:
    """Load weights into rank 0's model, and the state of losses and metrics, and return the checkpoint, if any.

    Raises:
        InvalidArgumentError: the checkpoint or the weights do not fit this run, or no checkpoint is complete.
    """
    checkpoint = checkpoints.latest()
    if checkpoint is not None:
        if problem := _misfit(spec, checkpoint):
            raise InvalidArgumentError(problem)
        load_weights(model, checkpoint.model, f"The checkpoint in {spec.run_dir} does")
        others.load_state_dict(checkpoint.others, f"The checkpoint in {spec.run_dir} does")
    elif spec.start_from:
        start, what = (
            checkpoints.load_start(spec.start_from),
            f"warm_start: the weights of {spec.start_from} do",
        )
        load_weights(model, start.result.model, what)
        others.load_state_dict(start.result.others, what)
    return checkpoint


def resume(start: RunStart, state: TrainingState) -> ResumePoint:
    """Send rank 0's state, from a checkpoint or initial, to every rank. All ranks must call it."""
    resumed, model, changes = start.resumed, state.model, start.resumed["changes"]
    state.changes.attributes.reset()
    if changes:
        state.changes.load_flags(changes)
        state.changes.regroup(changes["groups"])
    if start.optimizer and state.optimizer is not None:  # on rank 0
        state.optimizer.load_state_dict(start.optimizer)
    sent = broadcast_weights(model)
    state.others.begin(state.optimizer)
    if not resumed["is_new"]:
        release()  # frees rank 0's copy of the checkpoint
    if state.optimizer is not None:
        hvd.broadcast_optimizer_state(state.optimizer, 0)
    _load_parts(state, resumed)
    rank_state = resumed["ranks"][hvd.rank()] if resumed["step"] else None
    if state.callbacks is not None:
        state.callbacks.ctx.stop_reason = rank_state["stop_reason"] if rank_state else ""
    load_extra_states(model, resumed["extra"] | (rank_state["extra"] if rank_state else {}))
    if rank_state is not None:
        state.others.load_rank_state(rank_state.get("others", {}))
    if not resumed["is_new"]:
        # Remove the values of buffers that the checkpoint does not have.
        gone = unsaved_buffers(model).keys() - resumed["buffers"].keys()
        of_rank = rank_state["buffers"] if rank_state else {}
        load_buffers(model, {**dict.fromkeys(gone), **resumed["buffers"], **of_rank})
    return ResumePoint(
        resumed["history"],
        resumed["step"],
        rank_state,
        sent=sent,
        changes=changes,
        callbacks=resumed["callbacks"],
    )


@contextmanager
def repeated(state: TrainingState, position: ResumePoint, method: str) -> Iterator[None]:
    """Let callbacks repeat a method in the block, then restore the checkpoint's state. All ranks must enter the block.

    Without the restoration the method's changes would be applied twice, because the checkpoint already includes them.

    Args:
        state: state of the run.
        position: position at which the run begins or continues.
        method: "on_train_begin", or "on_epoch_begin".
    """
    assert state.callbacks is not None
    changes, is_begin = state.changes, method == "on_train_begin"
    loaded = position.changes if is_begin or position.is_inside else {}
    if not loaded:
        yield
        if is_begin:
            changes.attributes.begun()
        return
    held = _Held(state, position.callbacks) if state.callbacks.has(method) else None
    # The method adds parameters to groups, so remove them first.
    if loaded["before"].get(method) is not None:
        changes.regroup(loaded["before"][method])
    yield
    if is_begin:
        changes.attributes.begun()
    changes.load_flags(loaded)
    changes.load_attributes(loaded, state.watch)
    changes.regroup(loaded["groups"])
    if held is not None:
        held.restore()
    changes.set_modes(loaded, all_of=not is_begin)


class _Held:
    """CPU copy of everything in a checkpoint that a callback could change."""

    def __init__(self, state: TrainingState, callbacks: State | None) -> None:
        """Copy the state.

        `callbacks` is the callbacks' loaded state, because before `on_train_begin` they may not have a state of their
        own.
        """
        self._state = state
        self._weights = [(p, _copy(p)) for p in self._parameters()]
        self._buffers = _copy(dict(state.model.named_buffers()))
        self._extra = copy.deepcopy(extra_states(state.model))
        self._others = _copy(state.others.rank_state())
        optimizer = state.optimizer
        # Bypass the property of a distributed optimizer, which would wait.
        groups = [] if optimizer is None else optimizer.__dict__["param_groups"]
        self._options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        of_optimizer = {} if optimizer is None else optimizer.state
        self._of_parameters = [(p, dict(part), _copy(part)) for p, part in of_optimizer.items()]
        parts: tuple[Stateful | None, ...] = (state.scheduler, state.scaler)
        self._parts: list[tuple[Stateful, State]]
        self._parts = [(p, copy.deepcopy(p.state_dict())) for p in parts if p is not None]
        if callbacks is not None and state.callbacks is not None:
            self._parts.append((state.callbacks, callbacks))

    def _parameters(self) -> Iterator[Tensor]:
        yield from self._state.model.parameters()
        yield from self._state.others.parameters.values()

    def restore(self) -> None:
        state = self._state
        with torch.no_grad():
            for parameter, value in self._weights:
                if not torch.equal(parameter.detach().cpu(), value):
                    parameter.copy_(value)
            gone = dict(state.model.named_buffers()).keys() - self._buffers.keys()
            load_buffers(state.model, {**dict.fromkeys(gone), **self._buffers})
            load_extra_states(state.model, self._extra)
            state.others.load_rank_state(self._others)
            self._restore_optimizer()
        for part, value in self._parts:
            part.load_state_dict(value)

    def _restore_optimizer(self) -> None:
        if self._state.optimizer is None:
            return
        groups = self._state.optimizer.__dict__["param_groups"]
        for group, options in zip(groups, self._options, strict=True):
            parameters = group["params"]
            group.clear()  # change it in place, because a scheduler may refer to it
            group.update(options, params=parameters)
        of_parameters = self._state.optimizer.state
        of_parameters.clear()
        for parameter, objects, values in self._of_parameters:
            part = of_parameters[parameter] = {}
            for name, value in values.items():
                part[name] = value
                if isinstance(value, Tensor):  # copy into the original tensor, on its device
                    part[name] = objects[name].copy_(value)


def _copy(value: Any) -> Any:
    """Copy a value with the tensors in its dicts, lists and tuples to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copy(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return copy.deepcopy(value)


def _load_parts(state: TrainingState, resumed: Resumed) -> None:
    """Load the states of scheduler, scaler and callbacks."""
    parts: list[tuple[Stateful | None, State | None]] = [
        (state.scheduler, resumed["scheduler"]),
        (state.scaler, resumed["scaler"]),
        (state.callbacks, resumed["callbacks"]),
    ]
    for part, saved in parts:
        if part is not None and saved is not None:
            part.load_state_dict(saved)


def _misfit(spec: TrainSpec, checkpoint: Checkpoint) -> str:
    """Explain why this fit cannot resume from a checkpoint, or return "" if it can."""
    problem = differences(checkpoint.fingerprint, spec.fingerprint)
    if not problem and checkpoint.position > (spec.epochs, 0):
        problem = f"it has {checkpoint.epoch} epochs, but epochs is {spec.epochs}"
    if not problem:
        return ""
    return (
        f"{spec.run_dir} holds a checkpoint of another run: {problem}. Give another run_id, or the same model, "
        "data and params."
    )


def load_weights(model: nn.Module, weights: Mapping[str, object], what: str) -> None:
    """Load weights into the model.

    Raises:
        InvalidArgumentError: the weights do not fit the model.
    """
    try:
        model.load_state_dict(unwritten(model, weights))
    except RuntimeError as e:  # names and shapes, one per line
        raise InvalidArgumentError(
            f"{what} not fit this model: {e}. Give the same model, or another run_id."
        ) from e


def finish(module: nn.Module, result: Checkpoint, losses: Sequence[object] = ()) -> None:
    """Set a trained module's buffers, flags and attributes outside its state dict.

    A failure gives only a warning, so that the user does not lose the weights.

    Args:
        module: copy of the program's model.
        result: `Checkpoint.result`.
        losses: losses whose flags and attributes are set too.
    """
    try:
        if result.buffers or result.changes:  # older versions have neither
            gone = unsaved_buffers(module).keys() - result.buffers.keys()
            load_buffers(module, {**dict.fromkeys(gone), **result.buffers})
        set_changes(module, LossState(losses, (), module), result.changes)
    except Exception as e:  # noqa: BLE001 - the user's own code
        warnings.warn(
            "Attributes, flags or unsaved buffers that the training changed have their initial values in the returned model, because "
            f"setting them raised {type(e).__name__}: {e}. The weights are complete.",
            stacklevel=2,
        )


def capture(
    spec: TrainSpec,
    state: TrainingState,
    history: History,
    step: int = 0,
    ranks: Sequence[RankState] = (),
    *,
    weights: State,
    kept: State,
    attributes: Sequence[list[Entry]],
) -> Checkpoint:
    """Create the checkpoint of a finished epoch or, with `step` and `ranks`, of a step inside an epoch.

    Args:
        spec: spec of the run.
        state: state of the run.
        history: the records of completed epochs.
        step: completed optimizer steps of the next epoch.
        ranks: state of each rank inside the epoch.
        weights: the part of the model's state dict to save.
        kept: states of `TrainingState.kept`.
        attributes: changes of attributes on each rank, or only on this rank.
    """
    return Checkpoint(
        epoch=len(history),
        model=weights,
        optimizer=state.optimizer.state_dict() if state.optimizer is not None else {},
        scheduler=state.scheduler.state_dict() if state.scheduler is not None else None,
        history=list(history),
        fingerprint=spec.fingerprint,
        scaler=state.scaler.state_dict() if state.scaler is not None else None,
        callbacks=state.callbacks.state_dict() if state.callbacks is not None else None,
        buffers=unsaved_buffers(state.model),
        step=step,
        ranks=list(ranks),
        kept=kept,
        others=state.others.state_dict(),
        changes=state.changes.state_dict(state.watch, attributes),
    )


# ----------------------------------------------------------------------------------------------------
# Description of the differences between a fit and the checkpoint from which it should resume.

# Limits, so that the message for a model of thousands of parameters stays short.
_MOST_SHOWN = 8
_MOST_CHARACTERS = 80
_ABSENT = object()


def differences(old: str, new: str) -> str:
    """Describe the differences between two fingerprints (JSON objects) of fits, or return "" for equal fits.

    Example: "batch_size was 8 and is 16; model: '0.weight' was [6, 2] float32 and is [8, 2] float32".
    """
    befores, nows = read_json(old), read_json(new)
    texts = []
    for name in {**nows, **befores}:
        before, now = befores.get(name), nows.get(name)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            texts.append(f"{name}: {_entries(before, now)}")
        else:
            texts.append(_entry(name, before, now))
    return "; ".join(texts)


def _entries(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    names = [n for n in {**now, **before} if before.get(n, _ABSENT) != now.get(n, _ABSENT)]
    texts = [
        _entry(repr(n), before.get(n, _ABSENT), now.get(n, _ABSENT)) for n in names[:_MOST_SHOWN]
    ]
    if len(names) > _MOST_SHOWN:
        texts.append(f"and {len(names) - _MOST_SHOWN} more")
    return ", ".join(texts)


def _entry(name: str, before: object, now: object) -> str:
    if before is _ABSENT:
        return f"{name} is new"
    if now is _ABSENT:
        return f"{name} is gone"
    texts = json.dumps(before), json.dumps(now)
    if sum(map(len, texts)) < _MOST_CHARACTERS:
        return f"{name} was {texts[0]} and is {texts[1]}"
    return f"{name} differs"


# ----------------------------------------------------------------------------------------------------
# State of `Compression.powersgd` in checkpoints.
# Q and the number of steps are equal on all ranks. Each rank has its own errors, also between epochs. They are as large
# as the gradients. Rank 0 gathers the errors for the file, and scatters them when a run resumes.


class _Alike(TypedDict):
    """Part of a parameter's state with equal values on all ranks."""

    steps: int
    q: Tensor


class _Gathered(TypedDict):
    """State of all ranks by parameter. The errors of a parameter have one row per rank."""

    alike: dict[str, _Alike]
    errors: dict[str, Tensor]


def gather_compression(compression: Compression | None) -> State:
    """Gather the state of a compression for a checkpoint. All ranks must call it.

    Returns:
        On rank 0 "alike" (steps and q of each parameter) and "errors" (for each parameter a tensor with one row per
        rank). On other ranks, and for a compression without state, an empty dict. The tensors are copies.

    Cost: every rank sends its errors to rank 0, one parameter after another.
    """
    if not isinstance(compression, PowerSGD):
        return {}
    states = compression.state_dict()
    alike = {
        n: {"steps": s["steps"], "q": s["q"].detach().to("cpu", copy=True)}
        for n, s in states.items()
    }
    errors = {n: _gather(n, s["error"]) for n, s in states.items() if s["error"] is not None}
    return {"alike": alike, "errors": errors} if hvd.rank() == 0 else {}


def load_compression(
    compression: Compression, state: State, device: torch.device | None = None
) -> None:
    """Restore rank 0's result of `gather_compression`, before the optimizer is built. All ranks must call it.

    Args:
        compression: compression of this rank.
        state: rank 0's state is used; an empty state changes nothing.
        device: device of the gradients; None means the CPU.
    """
    if not isinstance(compression, PowerSGD):
        return
    gathered = cast("_Gathered", state) if hvd.rank() == 0 and state else None
    header = None
    if gathered is not None:
        shapes = {n: (e.shape[1:], e.dtype) for n, e in gathered["errors"].items()}
        header = (gathered["alike"], shapes)
    header = hvd.broadcast_object(header, 0, name="compression")
    if header is None:
        return
    alike, shapes = header
    errors = {
        name: _scatter(name, shape, dtype, None if gathered is None else gathered["errors"][name])
        for name, (shape, dtype) in shapes.items()
    }
    compression.load_state_dict(
        {
            n: {
                "steps": s["steps"],
                "q": s["q"].to(device),
                "error": e if e is None else e.to(device),
            }
            for n, s in alike.items()
            for e in [errors.get(n)]
        }
    )


def _gather(name: str, error: Tensor) -> Tensor:
    """Gather all ranks' errors on rank 0 as a CPU tensor (ranks, *shape). Other ranks get 0 rows."""
    error = error.cpu()
    splits = [error.numel(), *[0] * (hvd.size() - 1)]
    received, _ = hvd.alltoall(error.reshape(-1), splits, name=f"compression.{name}")
    return received.reshape(-1, *error.shape)


def _scatter(name: str, shape: torch.Size, dtype: torch.dtype, rows: Tensor | None) -> Tensor:
    """Receive this rank's row of rank 0's tensor."""
    sent = torch.empty(0, dtype=dtype) if rows is None else rows.reshape(-1)
    each = 0 if rows is None else shape.numel()
    received, _ = hvd.alltoall(sent, [each] * hvd.size(), name=f"compression.{name}")
    return received.reshape(shape)
