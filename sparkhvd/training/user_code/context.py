"""`ctx`: the view of a run that the user's functions and callbacks get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

import sparkhvd.torch as hvd

if TYPE_CHECKING:  # they import this
    from sparkhvd.training.checkpoints.resume import TrainingState
    from sparkhvd.training.spec import TrainSpec

__all__ = ["Context", "Moment"]


@dataclass
class Moment:
    """Epoch and step of the training; one object per run, moved by the loop."""

    epoch: int = 0
    step: int = 0


class Context:
    """Base of every `ctx`; its attributes are for reading.

    Attributes:
        rank: this process among `size`.
        size: number of ranks.
        model: the module that is trained, on `device`.
        optimizer: the distributed optimizer over its parameters.
        scheduler: the learning rate scheduler, or None.
        device: of the model.
        store: holds data, checkpoints and metrics of this run.
        run_dir: the run's folder in the store; write own files to `<run_dir>/user/`.
        epochs: epochs to train in all.
        moment: epoch and step of the training; the loop moves it.
    """

    def __init__(self, spec: TrainSpec, state: TrainingState, moment: Moment) -> None:
        """Take the objects of a run."""
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
        """The epoch that runs, counted from 1 as in the history; 0 before the first."""
        return self.moment.epoch

    @property
    def step(self) -> int:
        """The step of the optimizer, counted from 1 over all epochs; 0 before the first."""
        return self.moment.step
