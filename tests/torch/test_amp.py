"""`torch.amp` with `DistributedOptimizer`, as the documents of PyTorch and Horovod show it.

Non-finite gradients on one rank skip the step on all ranks, on both planes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.settings import Settings
from tests.harness import device_training as training
from tests.harness.fake_cuda import Factories, FakeDevice
from tests.harness.soak import amount, left_to_soak
from tests.torch.on_gpus import on_gpus
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks

SMALL = Settings(bucket_bytes=512, device_bucket_bytes=1024)
SIZE = amount(2, 3)
STEPS = 6
OVERFLOW = 3  # the step of which one rank's gradients are not finite
SCALE = 64.0


class Cpu:
    """Device of the tests without a GPU: tensors stay on the CPU."""

    def tensor(self, values: Tensor) -> Tensor:
        return values

    def module(self, module: nn.Module) -> nn.Module:
        return module


def plain(optimizer: Any, scaler: torch.amp.GradScaler, module: nn.Module) -> None:
    """Step as in PyTorch's example."""
    scaler.step(optimizer)


def clipped(optimizer: Any, scaler: torch.amp.GradScaler, module: nn.Module) -> None:
    """Step as in PyTorch's example with clipping."""
    scaler.unscale_(optimizer)
    training.clip(optimizer, module)
    scaler.step(optimizer)


def horovod(optimizer: Any, scaler: torch.amp.GradScaler, module: nn.Module) -> None:
    """Step as in Horovod's example."""
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    training.clip(optimizer, module)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Step with an optimizer that unscales and searches for non-finite gradients itself."""
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-2, fused=True)


Order = Callable[[Any, torch.amp.GradScaler, nn.Module], None]
Make = Callable[[Any], torch.optim.Optimizer]


def train(
    place: Any, optimizer: Any, module: nn.Module, order: Order, share: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float]:
    """Train, and return the weights and the scale at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (share(part) for part in training.batch(step, torch.float64))
        loss = (module(place.tensor(x)) - place.tensor(y)).square().mean()
        if step == OVERFLOW and hvd.rank() == SIZE - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        order(optimizer, scaler, module)
        scaler.update()
    return training.weights(module), scaler.get_scale()


@functools.cache
def expected(make: Make, order: Order) -> tuple[Tensor, float]:
    """Train one process that has every row, and skips the same step."""

    def body() -> tuple[Tensor, float]:
        module = training.model()
        optimizer: Any = make(module.parameters())
        steps = hvd.DistributedOptimizer(optimizer)  # of one rank: only its methods are other ones
        return train(Cpu(), steps, module, order, lambda x: x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "rank", lambda: SIZE - 1)
        found: tuple[Tensor, float] = on_ranks(1, body)[0]
    return found


def together(plane: str, make: Make, order: Order, **options: Any) -> list[tuple[Tensor, float]]:
    def body(place: Any) -> tuple[Tensor, float]:
        module = place.module(training.model())
        optimizer = hvd.DistributedOptimizer(make(module.parameters()), **options)
        is_gpu = isinstance(place, FakeDevice)
        with Factories(place) if is_gpu else contextlib.nullcontext():
            return train(place, optimizer, module, order, lambda x: x.chunk(hvd.size())[hvd.rank()])

    if plane == "cpu":
        return on_ranks(SIZE, lambda: body(Cpu()), settings=SMALL)
    return on_gpus(SIZE, body, settings=SMALL)


@pytest.fixture(params=["cpu", "gpu"])
def plane(request: pytest.FixtureRequest) -> str:
    if request.param == "gpu":
        request.getfixturevalue("fake_gpus")
    return str(request.param)


ORDERS = (plain, clipped, horovod)
EVERY_CASE = list(itertools.product(("cpu", "gpu"), ORDERS, (training.sgd, fused), (False, True)))
# Several cases have each plane, order, kind of optimizer and kind of sharding.
FEW = [
    ("cpu", plain, training.sgd, False),
    ("cpu", plain, fused, True),
    ("cpu", clipped, fused, False),
    ("cpu", clipped, training.sgd, True),
    ("cpu", horovod, training.sgd, False),
    ("cpu", horovod, fused, True),
    ("gpu", plain, training.sgd, True),
    ("gpu", clipped, fused, False),
    ("gpu", clipped, fused, True),
    ("gpu", horovod, training.sgd, False),
]


@pytest.mark.parametrize(
    ("plane", "order", "make", "sharded"),
    [
        *FEW,
        *left_to_soak("pairs of these, here", *(case for case in EVERY_CASE if case not in FEW)),
    ],
    indirect=["plane"],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "__name__", str(each)),
)
def test_every_rank_skips_a_step_with_non_finite_gradients(
    plane: str, order: Order, make: Make, sharded: bool
) -> None:
    wanted, scale = expected(make, order)
    for found, its_scale in together(plane, make, order, sharded=sharded):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
        assert its_scale == scale


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"gradient_as_bucket_view": True},
        {"compression": hvd.Compression.fp16, "sharded": True},
    ],
    ids=str,
)
def test_non_finite_gradients_reach_the_scaler_with_every_option(
    plane: str, options: dict[str, Any]
) -> None:
    """Non-finite gradients must reach the scaler with each option."""
    _, scale = expected(training.sgd, plain)
    found = together(plane, training.sgd, plain, **options)
    for weights, its_scale in found:
        assert torch.equal(weights, found[0][0])
        assert bool(weights.isfinite().all())
        assert its_scale == scale


def test_accumulated_passes_use_one_loss_scale(plane: str) -> None:
    """All passes of a step have the same scale."""

    def body(place: Any) -> Tensor:
        module = place.module(training.model())
        optimizer: Any = hvd.DistributedOptimizer(
            training.sgd(module.parameters()), backward_passes_per_step=2
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        is_gpu = isinstance(place, FakeDevice)
        with Factories(place) if is_gpu else contextlib.nullcontext():
            for step in range(3):
                optimizer.zero_grad()
                for number in range(2):
                    x, y = training.batch(step * 2 + number, torch.float64)
                    mine = [place.tensor(part.chunk(hvd.size())[hvd.rank()]) for part in (x, y)]
                    loss = (module(mine[0]) - mine[1]).square().mean()
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return training.weights(module)

    wanted = training.alone(steps=3, passes=2)
    run: Any = on_gpus if plane == "gpu" else lambda size, fn: on_ranks(size, lambda: fn(Cpu()))
    for found in run(2, body):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_autocast_forward_in_bfloat16_reduces_float32_gradients() -> None:
    """Forward runs in bfloat16, gradients and their reduction stay in float32. torch casts only on devices that it knows."""

    def body() -> Tensor:
        module = training.model(torch.float32)
        optimizer: Any = hvd.DistributedOptimizer(training.sgd(module.parameters()))
        for step in range(4):
            optimizer.zero_grad()
            parts = training.batch(step, torch.float32)
            x, y = (part.chunk(hvd.size())[hvd.rank()] for part in parts)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = module(x)
            assert found.dtype == torch.bfloat16
            (found.float() - y).square().mean().backward()
            optimizer.step()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())
        return training.weights(module)

    wanted = training.alone(steps=4, dtype=torch.float32)
    found = on_ranks(2, body)
    assert torch.equal(found[0], found[1])
    assert float((found[0] - wanted).abs().max()) < 2e-2
