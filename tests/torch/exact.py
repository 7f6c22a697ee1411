"""Models, data and the loop for tests in which N ranks with batch b train as one process with batch N * b.

The loss of each problem is a mean over the rows of a batch. So the average of the ranks' gradients is the gradient of the whole batch,
and only rounding differs. Activations are smooth: at the kink of a ReLU, rounding would choose the branch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from tests.harness.soak import amount
from tests.torch.on_ranks import on_ranks

ROWS = 12  # shares of 2, 3 and 4 ranks are equal
STEPS = amount(11, 20)
# Relative to the largest weight.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
# Several buckets even for small models.
SMALL = Settings(bucket_bytes=256)

# Optimizers that divide by the size of a gradient turn rounding into steps where a gradient is (nearly) zero, as that
# of the keys' bias in attention always is. Gradients here are about 0.01 to 0.1; this keeps far smaller ones
# small.
EPS = 1e-2

Batch = tuple[Tensor, ...]
Make = Callable[[Any], torch.optim.Optimizer]


# --- Problems. ---


@dataclass(frozen=True)
class Problem:
    """A model and its data.

    Attributes:
        name: shown in the test's id.
        build: makes the same model in each call. `norm` makes its batch norms.
        batch: the whole batch of a step, with rows first in every tensor.
        loss: mean over the rows.
    """

    name: str
    build: Callable[..., nn.Module]
    batch: Callable[[int, torch.dtype], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]

    def __str__(self) -> str:
        return self.name


def fill(model: nn.Module, seed: int = 1) -> nn.Module:
    """Set start values without torch's global generator, which ranks that are threads share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            is_norm = p.dim() == 1 and name.endswith("weight")
            p.copy_(1 + 0.1 * values if is_norm else 0.3 * values)
    return model


def _random(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _mean_squares(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def _mlp(dtype: torch.dtype = torch.float64, norm: Any = None, *, bias: bool = True) -> nn.Module:
    del norm
    layers = (nn.Linear(6, 16, bias), nn.Tanh(), nn.Linear(16, 8, bias), nn.Tanh())
    # Among 40 seeds, the one whose gradients stay farthest from zero with Rprop.
    return fill(nn.Sequential(*layers, nn.Linear(8, 2, bias)), seed=32).to(dtype)


def _vectors(step: int, dtype: torch.dtype) -> Batch:
    x = _random(step, ROWS, 6)
    return x.to(dtype), x[:, :2].sin().to(dtype)


class _Residual(nn.Module):
    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            norm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x + self.body(x))


def _cnn(dtype: torch.dtype, norm: Any = nn.BatchNorm2d) -> nn.Module:
    return fill(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            norm(4),
            nn.SiLU(),
            _Residual(4, norm),
            nn.AvgPool2d(3),
            nn.Flatten(),
            nn.Linear(16, 2),
        )
    ).to(dtype)


def _images(step: int, dtype: torch.dtype) -> Batch:
    x = _random(step, ROWS, 1, 6, 6)
    return x.to(dtype), x[:, 0, 0, :2].sin().to(dtype)


def _transformer(dtype: torch.dtype, norm: Any = None) -> nn.Module:
    del norm
    layer = nn.TransformerEncoderLayer(
        8, nhead=2, dim_feedforward=16, dropout=0.0, activation="gelu", batch_first=True
    )
    return fill(nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 2))).to(dtype)


def _sequences(step: int, dtype: torch.dtype) -> Batch:
    x = _random(step, ROWS, 5, 8)
    return x.to(dtype), x[:, 0, :2].sin().to(dtype)


class _Tokens(nn.Module):
    """The mean of a row's vectors, then a layer or, without `head`, nothing."""

    def __init__(self, *, sparse: bool, head: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse)
        self.head = nn.Linear(4, 2) if head else nn.Flatten()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).mean(1))


def _tokens(*, sparse: bool, head: bool = True) -> Callable[..., nn.Module]:
    def build(dtype: torch.dtype, norm: Any = None) -> nn.Module:
        del norm
        return fill(_Tokens(sparse=sparse, head=head)).to(dtype)

    return build


def _sentences(step: int, dtype: torch.dtype, outputs: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    # A third of the tokens do not occur in a step, and some occur on one rank only.
    tokens = torch.randint(0, 20, (ROWS, 2), generator=generator)
    y = torch.randn(ROWS, outputs, generator=generator, dtype=torch.float64)
    return tokens, y.to(dtype)


def _matrix(dtype: torch.dtype, norm: Any = None) -> nn.Module:
    del norm
    return fill(nn.Linear(6, 2, bias=False)).to(dtype)


def _shifting_planes(step: int, dtype: torch.dtype) -> Batch:
    """Make the same orthogonal inputs in every step, with other outputs."""
    x = torch.linalg.qr(_random(0, ROWS, 6))[0] * ROWS**0.5
    x = x * torch.tensor([0.8, 0.9, 1.0, 1.1, 1.2, 1.3], dtype=torch.float64)
    return x.to(dtype), (x @ _random(step, 6, 2)).to(dtype)


MLP = Problem("mlp", _mlp, _vectors, _mean_squares)
# For Muon, which takes matrices only.
MATRICES = Problem("matrices", functools.partial(_mlp, bias=False), _vectors, _mean_squares)
# For line searches, which compare losses: nearly round, and its minimum moves before only rounding is left.
SHIFTING = Problem("shifting", _matrix, _shifting_planes, _mean_squares)
CNN = Problem("cnn", _cnn, _images, _mean_squares)
TRANSFORMER = Problem("transformer", _transformer, _sequences, _mean_squares)
EMBEDDING = Problem("embedding", _tokens(sparse=False), _sentences, _mean_squares)
SPARSE = Problem("sparse", _tokens(sparse=True), _sentences, _mean_squares)
# For SparseAdam, which takes sparse gradients only.
TABLE = Problem(
    "table",
    _tokens(sparse=True, head=False),
    functools.partial(_sentences, outputs=4),
    _mean_squares,
)


# --- Optimizers. ---

# Every optimizer of torch.optim by name, with the arguments to try. A learning rate is such that `STEPS` move the
# weights by far more than the bound, and training converges rather than oscillates.
ARGUMENTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "ASGD": ({"lr": 0.1, "t0": 5.0},),
    "Adadelta": ({"lr": 1.0, "eps": 1e-3},),
    "Adafactor": ({"lr": 0.05, "eps": (EPS, 1e-3)},),
    "Adagrad": ({"lr": 0.1, "eps": EPS},),
    "Adam": ({"lr": 0.01, "eps": EPS}, {"lr": 0.01, "eps": EPS, "amsgrad": True}),
    "AdamW": ({"lr": 0.01, "eps": EPS},),
    "Adamax": ({"lr": 0.01, "eps": EPS},),
    "LBFGS": (
        {"lr": 0.1, "max_iter": 2, "history_size": 4},
        # Takes `SHIFTING`. One iteration per batch, because later ones search along smaller and smaller differences.
        {"lr": 0.5, "max_iter": 1, "history_size": 4, "line_search_fn": "strong_wolfe"},
    ),
    # Muon orthogonalises in bfloat16. A rounding error of float32 that falls on a boundary there changes an element
    # of the step by 1/256 of it; the learning rate keeps that below a tenth of the bound.
    "Muon": ({"lr": 0.001},),
    "NAdam": ({"lr": 0.01, "eps": EPS},),
    "RAdam": ({"lr": 0.01, "eps": EPS},),
    "RMSprop": (
        {"lr": 0.01, "eps": EPS},
        {"lr": 0.01, "eps": EPS, "momentum": 0.5, "centered": True},
    ),
    # Steps by the sign of a gradient, so no gradient may be close to zero. Another test checks the data for that.
    "Rprop": ({"lr": 0.001},),
    "SGD": (
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "SparseAdam": ({"lr": 0.01, "eps": EPS},),
}


def optimizer_names() -> list[str]:
    """Return the names of this torch's optimizers."""
    found = []
    for name, value in vars(torch.optim).items():
        is_optimizer = inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
        if is_optimizer and value is not torch.optim.Optimizer:
            found.append(name)
    return sorted(found)


@dataclass(frozen=True)
class Case:
    """Optimizer with its arguments."""

    optimizer: str
    arguments: tuple[tuple[str, Any], ...]

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, self.optimizer)
        return kind(parameters, **dict(self.arguments))

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.arguments if key not in ("lr", "eps")]
        return "-".join([self.optimizer, *shown])


def case(optimizer: str, **arguments: Any) -> Case:
    """Make a case of the optimizer with the first arguments in `ARGUMENTS`, and these."""
    return Case(optimizer, tuple({**ARGUMENTS[optimizer][0], **arguments}.items()))


def cases(optimizer: str) -> list[Case]:
    """Make cases of an optimizer with all of its arguments, and of the first ones in its other implementations."""
    known = inspect.signature(getattr(torch.optim, optimizer)).parameters
    variants = [{name: True} for name in ("foreach", "fused") if name in known]
    made = [Case(optimizer, tuple(arguments.items())) for arguments in ARGUMENTS[optimizer]]
    return made + [case(optimizer, **variant) for variant in variants]


# --- Training. ---


def mine(batch: Batch) -> Batch:
    """Return this rank's share of the rows."""
    return tuple(t.chunk(hvd.size())[hvd.rank()] for t in batch)


def values(model: nn.Module) -> Tensor:
    """Return all parameters and running statistics."""
    state = [t.detach() for t in model.state_dict().values() if t.is_floating_point()]
    return torch.cat([t.reshape(-1) for t in state])


def train(
    problem: Problem,
    make: Make,
    dtype: torch.dtype = torch.float64,
    *,
    distributed: bool,
    steps: int = STEPS,
    norm: Any = nn.BatchNorm2d,
    **options: Any,
) -> Tensor:
    """Return the weights after training. `options` are those of DistributedOptimizer."""
    model = problem.build(dtype, norm)
    optimizer = make(model.parameters())
    if distributed:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), **options
        )
    for step in range(steps):
        batch = problem.batch(step, dtype)
        batch = mine(batch) if distributed else batch

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = problem.loss(model, batch)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return values(model)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest weight."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def compare(
    run: Callable[[bool], Tensor],
    *,
    size: int = 2,
    dtype: torch.dtype = torch.float64,
    **on: Any,
) -> None:
    """Check that `run(True)` gives the same bits on every rank, and the weights of `run(False)` in one process."""
    on.setdefault("settings", SMALL)
    results = on_ranks(size, lambda: run(True), **on)
    same_everywhere(results)
    assert distance(results[0], run(False)) <= BOUNDS[dtype]


def same_everywhere(results: list[Tensor]) -> None:
    """Check that every rank has the same bits, and that all are finite."""
    assert torch.isfinite(results[0]).all()
    for result in results[1:]:
        assert torch.equal(result, results[0])
