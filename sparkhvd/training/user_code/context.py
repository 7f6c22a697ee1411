"""What the user's functions and callbacks get to see of a run: `ctx`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import sparkhvd.torch as hvd

if TYPE_CHECKING:  # it imports what imports this
    from sparkhvd.training.spec import TrainSpec

__all__ = ["Context", "Moment"]


@dataclass
class Moment:
    """Where the training is; one object per run, moved by the loop."""

    epoch: int = 0
    step: int = 0


class Context:
    """What every `ctx` has; the attributes are for reading.

    Attributes:
        rank: this process among `size`.
        size: number of ranks.
        model: the module that is trained, on `device`.
        optimizer: the distributed optimizer over its parameters.
        scheduler: the learning rate scheduler, or None.
        device: where the model is.
        store: where everything of this run is.
        run_dir: the run's folder in the store; write own files to `<run_dir>/user/`.
        epochs: epochs to train in all.
        moment: where the training is; the loop moves it.
    """

    def __init__(self, spec: TrainSpec, state: Any, moment: Moment) -> None:
        """The loop makes it, from its `TrainingState`."""
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.model: nn.Module = state.model
        self.optimizer: Any = state.optimizer
        self.scheduler: Any = state.scheduler
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
