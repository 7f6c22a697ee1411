"""What all ranks must have alike: resumed state, buffers, random numbers, and the errors they raise together."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import CollectiveError, InvalidArgumentError
from sparkhvd.estimator.training.callbacks import Callbacks
from sparkhvd.estimator.training.checkpoint import Checkpoint, Checkpoints
from sparkhvd.estimator.training.fingerprint import differences
from sparkhvd.estimator.training.metrics import Totals
from sparkhvd.estimator.training.rank_state import load_buffers, load_rng, unsaved_buffers
from sparkhvd.estimator.training.spec import TrainSpec

__all__ = [
    "Position",
    "TrainingState",
    "broadcast_buffers",
    "fail_together",
    "resume",
    "seed_everything",
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
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    callbacks: Callbacks | None = None


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


def resume(spec: TrainSpec, checkpoints: Checkpoints, state: TrainingState) -> Position:
    """Give every rank rank 0's state: the newest checkpoint's, or the one to start from. All ranks must call it."""
    found: Checkpoint | None = None
    said: dict[str, Any] = {"history": [], "step": 0, "ranks": [], "buffers": {}, "problem": ""}
    if hvd.rank() == 0:
        found = checkpoints.latest()
        if found is not None:
            said["problem"] = _misfit(spec, found)
            said |= {n: getattr(found, n) for n in _SAID}
        elif spec.start_from:
            said["problem"] = _start(spec, checkpoints, state.model)
    said = hvd.broadcast_object(said, 0, name="resume")
    if said["problem"]:
        fail_together(said["problem"])
    if found is not None:
        state.model.load_state_dict(found.model)
        if state.optimizer is not None:
            state.optimizer.load_state_dict(found.optimizer)
    hvd.broadcast_parameters(_tensors(state.model.state_dict()), 0)
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
    load_buffers(state.model, said["buffers"] | own.get("buffers", {}))
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


def _start(spec: TrainSpec, checkpoints: Checkpoints, model: nn.Module) -> str:
    """Give the model the weights to start from; returns why that is impossible, or ""."""
    try:
        model.load_state_dict(checkpoints.load_weights(spec.start_from))
    except RuntimeError as e:  # names and shapes, one per line
        return (
            f"warm_start: the weights of {spec.start_from} do not fit this model: {e}. Give the same model, or "
            "another run_id."
        )
    return ""


def take(
    spec: TrainSpec, state: TrainingState, history: list[dict[str, Any]], **inside: Any
) -> Checkpoint:
    """The checkpoint of the epoch that has ended or, with `step` and `ranks`, of a step. Called by rank 0."""
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
        **inside,
    )


def seed_everything(seed: int, epoch: int, rank: int) -> None:
    """Seed torch, numpy and random for an epoch on a rank: a resumed epoch draws what it drew before."""
    state = np.random.SeedSequence([seed & (2**64 - 1), epoch, rank]).generate_state(3)
    torch.manual_seed(int(state[0]))
    np.random.seed(int(state[1]))
    random.seed(int(state[2]))


def fail_together(message: str, cause: Exception | None = None) -> NoReturn:
    """Raise InvalidArgumentError on every rank; every rank must call it with the same message."""
    # A rank that ended now would take the message from a slower one, which would see only its loss.
    with contextlib.suppress(CollectiveError):
        hvd.barrier()
    raise InvalidArgumentError(message) from cause


def broadcast_buffers(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers: running statistics are of its rows, in validation and checkpoint alike."""
    buffers = _tensors(dict(model.named_buffers()))
    if buffers:
        hvd.broadcast_parameters(buffers, 0)


def _tensors(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
