"""What all ranks must have alike: resumed state, buffers, random numbers, and the errors they raise together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.checkpoints.files import Checkpoint, Checkpoints
from sparkhvd.training.checkpoints.fingerprint import differences
from sparkhvd.training.checkpoints.module_state import (
    extra_states,
    load_buffers,
    load_extra_states,
    unsaved_buffers,
)
from sparkhvd.training.checkpoints.rank_state import load_rng
from sparkhvd.training.metrics import Totals
from sparkhvd.training.spec import TrainSpec
from sparkhvd.training.together import fail_together
from sparkhvd.training.user_code.callbacks import Callbacks

__all__ = [
    "Position",
    "Start",
    "TrainingState",
    "find_start",
    "resume",
    "take",
]


@dataclass
class TrainingState:
    """What training changes, and a checkpoint holds.

    Attributes:
        model: the module.
        optimizer: the distributed one.
        scheduler: of the learning rate, or None.
        scaler: of the loss, for float16; else None.
        callbacks: the user's; some have a state.
        compression: of gradients; some have a memory.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    callbacks: Callbacks | None = None
    compression: Any = None


@dataclass
class Start:
    """What a run begins with, besides the model's weights.

    Attributes:
        is_new: whether there is no checkpoint to go on from.
        said: by name what all ranks know of the checkpoint.
        optimizer: the optimizer's state; on rank 0 only.
        compression: the state of the compression of gradients; on rank 0 only.
    """

    is_new: bool
    said: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """Epochs that are done, and optimizer steps of the one after those."""
        return len(self.said["history"]), self.said["step"]


@dataclass
class Position:
    """Where training goes on.

    Attributes:
        history: the records of the epochs that are done.
        step: optimizer steps that are done of the epoch after those.
        own: what this rank had of its own after that step; empty at the beginning of an epoch.
    """

    history: list[dict[str, Any]]
    step: int = 0
    own: dict[str, Any] = field(default_factory=dict)

    def begin(self, totals: Totals) -> float:
        """Inside an epoch set random numbers and totals as they were here.

        Returns:
            The seconds that the epoch has taken so far.
        """
        if not self.own:
            return 0.0
        load_rng(self.own["rng"])
        totals.load_state_dict(self.own["totals"])
        return float(self.own["seconds"])


def find_start(spec: TrainSpec, checkpoints: Checkpoints, model: nn.Module) -> Start:
    """Look for a checkpoint to go on from, or weights to start from; rank 0's model gets the weights.

    All ranks must call it, before the optimizer is built.

    Raises:
        InvalidArgumentError: what was found does not fit this run; on all ranks.
    """
    found: Checkpoint | None = None
    said: dict[str, Any] = {"history": [], "step": 0, "ranks": [], "buffers": {}, "problem": ""}
    if hvd.rank() == 0:
        try:
            found = _load_start(spec, checkpoints, model, said)
        except InvalidArgumentError as e:
            said["problem"] = str(e)
        said["is_new"] = found is None
        said["extra"] = extra_states(model)
    said = hvd.broadcast_object(said, 0, name="resume")
    if said["problem"]:
        fail_together(said["problem"])
    if found is None:
        return Start(said["is_new"], said)
    return Start(False, said, found.optimizer, found.compression)


def _load_start(
    spec: TrainSpec, checkpoints: Checkpoints, model: nn.Module, said: dict[str, Any]
) -> Checkpoint | None:
    """Give rank 0's model its weights, and note in `said` what the other ranks need; returns the checkpoint, if any.

    Raises:
        InvalidArgumentError: it does not fit this run, or no checkpoint is whole.
    """
    found = checkpoints.latest()
    if found is not None:
        if problem := _misfit(spec, found):
            raise InvalidArgumentError(problem)
        _load(model, found.model, f"The checkpoint in {spec.run_dir} does")
        said |= {n: getattr(found, n) for n in _SAID}
    elif spec.start_from:
        weights = checkpoints.load_weights(spec.start_from)
        _load(model, weights, f"warm_start: the weights of {spec.start_from} do")
    return found


def resume(start: Start, state: TrainingState) -> Position:
    """Give every rank rank 0's state: the checkpoint's, or the model's own. All ranks must call it."""
    said, model = start.said, state.model
    if start.optimizer and state.optimizer is not None:  # on rank 0
        state.optimizer.load_state_dict(start.optimizer)
    hvd.broadcast_parameters(_tensors(model.state_dict()), 0)
    if state.optimizer is not None:
        hvd.broadcast_optimizer_state(state.optimizer, 0)
    parts = {
        "scheduler": state.scheduler,
        "scaler": state.scaler,
        "callbacks": state.callbacks,
    }
    for name, part in parts.items():
        if part is not None and said.get(name) is not None:
            part.load_state_dict(said[name])
    own = said["ranks"][hvd.rank()] if said["step"] else {}
    if state.callbacks is not None:
        state.callbacks.ctx.stop_reason = own.get("stop_reason", "")
    load_extra_states(model, said["extra"] | own.get("extra", {}))
    if not start.is_new:
        # What was empty then is so again.
        gone = unsaved_buffers(model).keys() - said["buffers"].keys()
        load_buffers(model, {**dict.fromkeys(gone), **said["buffers"], **own.get("buffers", {})})
    return Position(said["history"], said["step"], own)


# What every rank needs of a checkpoint besides the tensors of model and optimizer.
_SAID = ("history", "step", "ranks", "buffers", "scheduler", "scaler", "callbacks")


def _misfit(spec: TrainSpec, found: Checkpoint) -> str:
    """Why this fit cannot go on from a checkpoint, or ""."""
    problem = differences(found.fingerprint, spec.fingerprint)
    if not problem and found.position > (spec.epochs, 0):
        problem = f"it has {found.epoch} epochs, and epochs is {spec.epochs}"
    if not problem:
        return ""
    return (
        f"{spec.run_dir} holds a checkpoint of another run: {problem}. Give another run_id, or the same model, "
        "data and params."
    )


def _load(model: nn.Module, weights: dict[str, Any], what: str) -> None:
    """Give the model these weights."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:  # names and shapes, one per line
        raise InvalidArgumentError(
            f"{what} not fit this model: {e}. Give the same model, or another run_id."
        ) from e


def take(
    spec: TrainSpec, state: TrainingState, history: list[dict[str, Any]], **more: Any
) -> Checkpoint:
    """The checkpoint of the epoch that has ended or, with `step` and `ranks`, of a step. Called by rank 0.

    `more` are fields of the checkpoint that ranks have gathered.
    """
    return Checkpoint(
        epoch=len(history),
        model=state.model.state_dict(),
        optimizer=state.optimizer.state_dict() if state.optimizer is not None else {},
        scheduler=state.scheduler.state_dict() if state.scheduler is not None else None,
        history=list(history),
        fingerprint=spec.fingerprint,
        scaler=state.scaler.state_dict() if state.scaler is not None else None,
        callbacks=state.callbacks.state_dict() if state.callbacks is not None else None,
        buffers=unsaved_buffers(state.model),
        **more,
    )


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters and buffers of a state dict; a module's extra state may be a tensor too."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state"
    }
