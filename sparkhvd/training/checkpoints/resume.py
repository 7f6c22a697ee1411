"""Resuming: the state of training, taken for a checkpoint and given to all ranks again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.optimizer.distributed import Distributed
from sparkhvd.training.batches import Done
from sparkhvd.training.checkpoints.changes import Changes
from sparkhvd.training.checkpoints.checkpoint import Checkpoint
from sparkhvd.training.checkpoints.files import Checkpoints
from sparkhvd.training.checkpoints.fingerprint import differences
from sparkhvd.training.checkpoints.frozen import broadcast_weights, unwritten
from sparkhvd.training.checkpoints.module_state import (
    extra_states,
    load_buffers,
    load_extra_states,
    unsaved_buffers,
)
from sparkhvd.training.checkpoints.rank_state import RankState, load_rng
from sparkhvd.training.host_weights import give_back
from sparkhvd.training.metrics import Totals, TotalsState
from sparkhvd.training.others import Others
from sparkhvd.training.profile import Profile
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.together import fail_together
from sparkhvd.training.types import Compression, History, State, Stateful
from sparkhvd.training.user_code.callbacks import Callbacks

__all__ = [
    "Position",
    "Start",
    "TrainingState",
    "find_start",
    "load_weights",
    "resume",
    "take",
]


@dataclass
class TrainingState:
    """The objects that training changes and a checkpoint holds.

    Attributes:
        model: the module.
        optimizer: the distributed one; None where `train_fn` has its own.
        scheduler: of the learning rate, or None.
        scaler: of the loss, for float16; else None.
        callbacks: the user's; some have a state.
        compression: of gradients; some have a state.
        kept: objects of a `train_fn`, by name.
        profile: where the time goes; beside checkpoints, not in them.
        others: state of losses and metrics.
        changes: of model and optimizer; made with them.
    """

    model: nn.Module
    optimizer: Distributed | None
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    callbacks: Callbacks | None = None
    compression: Compression | None = None
    kept: dict[str, Stateful] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    others: Others = field(default_factory=Others)
    changes: Changes = field(init=False)

    def __post_init__(self) -> None:
        self.changes = Changes(self.model, self.optimizer)


class Resumed(TypedDict):
    """The part of a checkpoint that every rank needs, besides the tensors of model and optimizer."""

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
class Start:
    """The state that a run begins with, besides the model's weights.

    Attributes:
        resumed: the part of the checkpoint that all ranks have.
        optimizer: the optimizer's state; on rank 0 only.
        compression: the state of the compression of gradients; on rank 0 only.
    """

    resumed: Resumed
    optimizer: State = field(default_factory=dict)
    compression: State = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """Epochs that are done, and optimizer steps of the one after those."""
        return len(self.resumed["history"]), self.resumed["step"]


@dataclass
class Position:
    """The epoch and step from which training continues.

    Attributes:
        history: the records of the epochs that are done.
        step: optimizer steps that are done of the epoch after those.
        rank_state: this rank's own state after that step; None at the beginning of an epoch.
        done: part of that epoch that other ranks have done.
        sums: of these ranks, on one of those that go on; else None.
        seconds: that they have taken.
        sent: names of frozen parameters that rank 0 has sent to the others.
        changes: of model and optimizer that are loaded, see `Changes.repeated`.
    """

    history: History
    step: int = 0
    rank_state: RankState | None = None
    done: Done = Done()
    sums: TotalsState | None = None
    seconds: float = 0.0
    sent: frozenset[str] = frozenset()
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_inside(self) -> bool:
        """Whether a part of the epoch is done."""
        return bool(self.step or self.done.steps)

    def begin(self, totals: Totals) -> float:
        """Set random numbers and totals of a run that resumes inside an epoch.

        Returns:
            The seconds that the epoch has taken so far.
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
    others: Others | None = None,
) -> Start:
    """Find a checkpoint to resume from, or weights to start from; rank 0's model gets the weights, and `others` their state.

    All ranks must call it, before the optimizer is built. With one that rank 0 holds in memory the store is not asked.

    Raises:
        InvalidArgumentError: the checkpoint or the weights do not fit this run; on all ranks.
    """
    checkpoint: Checkpoint | None = None
    resumed: Resumed | None = None
    if hvd.rank() == 0:
        problem = ""
        try:
            if held is None:
                checkpoint = _load_start(spec, checkpoints, model, others or Others())
            else:
                load_weights(model, held.model, "The state in memory does")
                (others or Others()).load_state_dict(held.others, "The state in memory does")
                checkpoint = held
        except InvalidArgumentError as e:
            problem = str(e)
        resumed = _resumed(checkpoint, extra_states(model), problem)
    resumed = cast("Resumed", hvd.broadcast_object(resumed, 0, name="resume"))
    if resumed["problem"]:
        fail_together(resumed["problem"])
    if checkpoint is None:
        return Start(resumed)
    return Start(resumed, checkpoint.optimizer, checkpoint.compression)


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
    spec: TrainSpec, checkpoints: Checkpoints, model: nn.Module, others: Others
) -> Checkpoint | None:
    """Load the weights of rank 0's model, and the state of others; return the checkpoint, if there is one.

    Raises:
        InvalidArgumentError: it does not fit this run, or no checkpoint is whole.
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
        load_weights(model, start.result, what)
        others.load_state_dict(start.others, what)
    return checkpoint


def resume(start: Start, state: TrainingState) -> Position:
    """Give every rank rank 0's state: the checkpoint's, or the model's own. All ranks must call it."""
    resumed, model, changes = start.resumed, state.model, start.resumed["changes"]
    watch = state.callbacks.watch if state.callbacks is not None else None
    if changes:
        state.changes.load(changes, watch)
        state.changes.regroup(changes["groups"])
    if start.optimizer and state.optimizer is not None:  # on rank 0
        state.optimizer.load_state_dict(start.optimizer)
    sent = broadcast_weights(model)
    state.others.begin(state.optimizer)
    if not resumed["is_new"]:
        give_back()  # what rank 0 has read of the checkpoint
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
        # Buffers that did not exist then are emptied.
        gone = unsaved_buffers(model).keys() - resumed["buffers"].keys()
        of_rank = rank_state["buffers"] if rank_state else {}
        load_buffers(model, {**dict.fromkeys(gone), **resumed["buffers"], **of_rank})
    return Position(
        resumed["history"],
        resumed["step"],
        rank_state,
        sent=sent,
        changes=changes,
    )


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
    """Return the reason why this fit cannot resume from a checkpoint, or ""."""
    problem = differences(checkpoint.fingerprint, spec.fingerprint)
    if not problem and checkpoint.position > (spec.epochs, 0):
        problem = f"it has {checkpoint.epoch} epochs, and epochs is {spec.epochs}"
    if not problem:
        return ""
    return (
        f"{spec.run_dir} holds a checkpoint of another run: {problem}. Give another run_id, or the same model, "
        "data and params."
    )


def load_weights(model: nn.Module, weights: Mapping[str, object], what: str) -> None:
    """Load weights into the model.

    Raises:
        InvalidArgumentError: they do not fit it.
    """
    try:
        model.load_state_dict(unwritten(model, weights))
    except RuntimeError as e:  # names and shapes, one per line
        raise InvalidArgumentError(
            f"{what} not fit this model: {e}. Give the same model, or another run_id."
        ) from e


def take(
    spec: TrainSpec,
    state: TrainingState,
    history: History,
    step: int = 0,
    ranks: Sequence[RankState] = (),
    *,
    weights: State,
    kept: State,
) -> Checkpoint:
    """Make the checkpoint of the epoch that has ended or, with `step` and the ranks' states, of a step; on rank 0.

    `weights` is what it holds of the model's state dict, `kept` the states of `TrainingState.kept`.
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
        changes=state.changes.state_dict(state.callbacks.watch if state.callbacks else None),
    )
