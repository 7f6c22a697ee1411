"""A case of the corpus: a user's program, as data."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

# Divisible by the rows of a step of two ranks, so that all steps are full: an average over ranks is then an average over rows, and a
# share of one half is exact.
ROWS, BATCH, EPOCHS, SEED = 48, 8, 2, 7

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Data:
    """Columns of the rows, each an array of (ROWS, *shape of a row).

    Attributes:
        features: in the order of the model's arguments.
        labels: compared with the outputs by the loss, or read by a step.
        by_name: the names of the features are the names of the model's arguments. Otherwise each is a positional argument.
        is_dict: the model's one argument is a dict of them.
        is_joined: all features together are the model's one argument, (rows, their widths).
    """

    features: Columns
    labels: Columns = field(default_factory=dict)
    by_name: bool = False
    is_dict: bool = False
    is_joined: bool = False

    @property
    def columns(self) -> Columns:
        return {**self.features, **self.labels}


@dataclass(frozen=True)
class Case:
    """A program: it trains in plain PyTorch, and must train alike in `fit`.

    Attributes:
        name: unique in its table.
        model: makes the module.
        data: the rows.
        loss: makes the loss, or None if the model or `step` computes it.
        optimizer: a function of the parameters.
        step: `train_step(model, batch, ctx)`, for the plain loop, too.
        loop: `train_fn(ctx)`, for the plain loop, too.
        scheduler: a function of the optimizer.
        is_per_step: the scheduler moves after each step.
        options: further Params. The plain loop knows `precision`, `gradient_clip_norm`, `gradient_clip_value` and `accumulate`.
        has_closure: the optimizer evaluates the loss itself, as LBFGS does.
        is_function: `fit` gets the function that makes the module instead of a module.
        has_own_optimizer: `fit` gets an optimizer over the module's parameters instead of the function.
        label_arguments: features that are labels of the model's own loss.
        tolerance: 0 if all bits must be equal, else the relative difference, with the reason.
        ddp_tolerance: for the comparison with DistributedDataParallel, if larger.
        because: the reason for both.
        apart: why two ranks differ from one rank with twice the batch. Dropout and batch statistics are found automatically.
        twice_tolerance: for that comparison: the order of its sums differs, and an optimizer may magnify the difference.
        no_ddp: why DistributedDataParallel is no reference.
        resumes: a run whose rank is killed is compared too. Otherwise this is done for one case in sixteen.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Data
    loss: Callable[[], Any] | None = nn.MSELoss
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    step: Callable[..., Any] | None = None
    loop: Callable[..., None] | None = None
    scheduler: Callable[..., Any] | None = None
    is_per_step: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    has_closure: bool = False
    is_function: bool = False
    has_own_optimizer: bool = False
    label_arguments: Sequence[str] = ()
    tolerance: float = 0.0
    ddp_tolerance: float = 0.0
    because: str = ""
    apart: str = ""
    twice_tolerance: float = 1e-5
    no_ddp: str = ""
    resumes: bool = False

    def module(self) -> nn.Module:
        """Make the module with the weights that every program of this case starts from."""
        seed(SEED)
        return self.model()

    def made_loss(self) -> Any:
        """Make the loss, with the same weights in each call."""
        seed(SEED + 1)
        return None if self.loss is None else self.loss()

    @property
    def make_optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        return self.optimizer or sgd


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


# ----------------------------------------------------------------------------------------------------
# Columns and rows.


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Make normal numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal((ROWS, *shape)).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Make numbers between 0 and 1."""
    return np.random.default_rng([seed, *shape]).random((ROWS, *shape)).astype(np.float32)


def whole(end: int, *shape: int, begin: int = 0, seed: int = 0) -> np.ndarray:
    """Make integers from `begin` to before `end`."""
    return np.random.default_rng([seed, end, *shape]).integers(begin, end, (ROWS, *shape))


def target(x: np.ndarray, outputs: int = 1, seed: int = 1) -> np.ndarray:
    """Make numbers that follow from the features, (ROWS,) or (ROWS, outputs)."""
    flat = x.reshape(len(x), -1)
    weights = np.random.default_rng(seed).standard_normal((flat.shape[1], outputs))
    y = (np.tanh(flat @ weights / flat.shape[1] ** 0.5)).astype(np.float32)
    return y[:, 0] if outputs == 1 else y


def classes(x: np.ndarray, number: int) -> np.ndarray:
    """Make classes that follow from the features."""
    return np.argmax(target(x, number), axis=1)


@functools.cache
def rows(*shape: int, outputs: int = 1) -> Data:
    """Make rows of this shape, with numbers as the label."""
    x = floats(*shape)
    return Data({"x": x}, {"y": target(x, outputs)})


@functools.cache
def labelled(*shape: int, number: int = 3) -> Data:
    """Make rows of this shape, with a class as the label."""
    x = floats(*shape)
    return Data({"x": x}, {"c": classes(x, number)})


@functools.cache
def binary(*shape: int) -> Data:
    """Make rows of this shape, with 0.0 or 1.0 as the label."""
    x = floats(*shape)
    return Data({"x": x}, {"b": classes(x, 2).astype(np.float32)})


@functools.cache
def tokens(length: int = 6, size: int = 20, number: int = 3) -> Data:
    """Make rows of token numbers, with a class as the label."""
    ids = whole(size, length)
    return Data({"ids": ids}, {"c": ids.sum(1) % number})


TABLE = rows(4)


# ----------------------------------------------------------------------------------------------------
# Small modules.


def mlp(inputs: int = 4, outputs: int = 1, hidden: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


class Head(nn.Module):
    """A module, a function of its output, and a linear layer with `outputs`, whose inputs are counted on two rows."""

    def __init__(
        self,
        body: nn.Module,
        example: Any,
        outputs: int = 1,
        pick: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.pick = pick
        was = body.training
        body.eval()
        with torch.no_grad():
            width = self.flat(*(example if isinstance(example, tuple) else (example,))).shape[1]
        body.train(was)
        self.last = nn.Linear(width, outputs)

    def flat(self, *values: Any) -> torch.Tensor:
        result = self.body(*values)
        return (self.pick(result) if self.pick else result).flatten(1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.flat(x))


def headed(
    body: Callable[[], nn.Module],
    *shape: int,
    outputs: int = 1,
    pick: Callable[..., Any] | None = None,
) -> Callable[[], nn.Module]:
    """Return a function that makes `body()` followed by a linear layer, for rows of this shape."""
    return lambda: Head(body(), torch.ones(2, *shape), outputs, pick)
