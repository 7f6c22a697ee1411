"""Training on any GPUs: each rank's part of the tests of `DistributedOptimizer`.

Each function returns the weights, which the test compares with those of one process with the whole batch on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from tests.harness.device_bodies import Gpu

STEPS = 4  # momentum keeps an error of the first step
ROWS = 12  # shares of 2, 3 and 4 ranks are equal
Change = Callable[[torch.optim.Optimizer, nn.Module], None]


def fill(module: nn.Module) -> nn.Module:
    """Set start values without torch's global generator, which ranks that are threads share."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


class Model(nn.Module):
    """Layers, one that only some ranks use, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)
        self.extra = nn.Linear(8, 2)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, with_extra: bool = False) -> Tensor:
        """Compute the output, with the extra layer on request."""
        x = self.body(x)
        return self.head(x) + self.extra(x) if with_extra else self.head(x)


def model(dtype: torch.dtype = torch.float64) -> Model:
    """Build the same model on every call, on every rank."""
    made = fill(Model()).to(dtype)
    assert isinstance(made, Model)
    return made


def batch(step: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and outputs."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), x[:, :2].sin().to(dtype)


def weights(module: nn.Module) -> Tensor:
    """Return all parameters in one tensor, on the CPU."""
    return torch.cat([p.detach().cpu().reshape(-1).double() for p in module.parameters()])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Use momentum, so that a wrong step has a lasting effect."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def alone(
    *,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    passes: int = 1,
    change: Change | None = None,
    extra_for: Callable[[int, int], bool] = lambda step, row: False,
) -> Tensor:
    """Return the weights of one process with the whole batch. `extra_for(step, row)`: whether a row uses the extra layer."""
    module = model(dtype)
    optimizer = make(module.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            x, y = batch(step * passes + number, dtype)
            use = torch.tensor([[float(extra_for(step, row))] for row in range(ROWS)], dtype=dtype)
            hidden = module.body(x)
            found = module.head(hidden)
            if use.any():
                found = found + use * module.extra(hidden)
            (found - y).square().mean().backward()
        if change is not None:
            change(optimizer, module)
        optimizer.step()
    return weights(module)


def together(
    gpu: Gpu,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    passes: int = 1,
    set_to_none: bool = True,
    change: Change | None = None,
    uses_extra: Callable[[int, int], bool] = lambda step, rank: False,
    prepare: Callable[[nn.Module], nn.Module] = lambda module: module,
    **options: Any,
) -> Tensor:
    """Return the weights of one of several ranks. `change` runs between `synchronize()` and `step()`."""
    module = gpu.module(model(dtype))
    optimizer: Any = hvd.DistributedOptimizer(
        make(module.parameters()),
        named_parameters=module.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    rank, size = hvd.rank(), hvd.size()
    called = prepare(module)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(passes):
            x, y = (part.chunk(size)[rank] for part in batch(step * passes + number, dtype))
            found = called(gpu.tensor(x), with_extra=uses_extra(step, rank))
            (found - gpu.tensor(y)).square().mean().backward()
        if change is None:
            optimizer.step()
            continue
        optimizer.synchronize()
        change(optimizer, module)
        with optimizer.skip_synchronize():
            optimizer.step()
    return weights(module)


def clip(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Clip to half of the norm, so that it has an effect."""
    del optimizer
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def two_streams(gpu: Any) -> Tensor:
    """Run forward, backward and step in turn on other streams than the stream where the optimizer was made."""
    module = gpu.module(model())
    optimizer: Any = hvd.DistributedOptimizer(sgd(module.parameters()))
    rank, size = hvd.rank(), hvd.size()
    streams = [gpu.new_stream(), gpu.new_stream()]
    for step in range(4):
        before, stream = streams[step % 2 - 1], streams[step % 2]
        with gpu.using(stream):
            gpu.await_stream(before)
            if step == 0:
                gpu.await_stream(gpu.main_stream)
            optimizer.zero_grad()
            x, y = (part.chunk(size)[rank] for part in batch(step, torch.float64))
            (module(gpu.tensor(x)) - gpu.tensor(y)).square().mean().backward()
            optimizer.step()
            result = weights(module)
    return result
