"""Sparse gradients of parameters on GPUs, with the stand-in for CUDA, against one process on the CPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from sparkhvd.errors import MismatchError
from tests.harness.device_training import fill
from tests.harness.fake_cuda import Driver, Factories, FakeDevice, FakeTensor
from tests.torch.on_gpus import on_gpus

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("fake_gpus")]

ROWS, COLUMNS, STEPS = 11, 3, 4


class Lookup(torch.autograd.Function):
    """Lookup like `torch.nn.functional.embedding(sparse=True)`, which would read the memory of a fake GPU."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.shape = index, weight.shape
        return weight.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        (gradient,) = gradients
        if isinstance(gradient, FakeTensor):
            place = gradient.gpu.tensor(ctx.index[None])
            assert isinstance(place, FakeTensor)
            raw = torch.sparse_coo_tensor(
                place.raw, gradient.raw, ctx.shape, check_invariants=False, is_coalesced=False
            )
            return FakeTensor(raw, gradient.gpu), None
        made = (ctx.index[None], gradient, ctx.shape)
        return torch.sparse_coo_tensor(*made, check_invariants=True), None


class Model(nn.Module):
    """A table of which a step needs a few rows, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.float64))
        self.dense = nn.Linear(COLUMNS, 2).double()
        fill(self)

    def forward(self, index: Tensor) -> Tensor:
        found: Tensor = self.dense(Lookup.apply(self.table, index))
        return found


def indices(step: int, rank: int) -> Tensor:
    """Make the same number of indices on each rank, some of them repeated, some on both ranks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (5,), generator=generator)


def train(model: Any, optimizer: Any, ranks: list[int]) -> Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(model(indices(step, rank)).square().mean() for rank in ranks) / len(ranks)
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


@pytest.mark.parametrize("delay_us", [0, 300])
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 1e-12),
        ({"compression": hvd.Compression.fp16}, 1e-2),
        ({"sparse_as_dense": True}, 1e-12),
    ],
    ids=str,
)
def test_gpu_sparse_training_equals_one_process(
    fake_gpus: Driver, options: dict[str, Any], bound: float, delay_us: int
) -> None:
    fake_gpus.control("fake_cuda_stream_delay_us", delay_us)
    model = Model()
    expected = train(model, sgd(model), [0, 1, 2])

    def body(gpu: FakeDevice) -> Tensor:
        model = gpu.module(Model())
        optimizer = hvd.DistributedOptimizer(sgd(model), **options)
        with Factories(gpu):
            return train(model, optimizer, [hvd.rank()])

    for found in on_gpus(3, body):
        assert float((found - expected).abs().max()) < bound


def test_gpu_gradients_of_different_layouts_raise_a_mismatch() -> None:
    def body(gpu: FakeDevice) -> None:
        table = nn.Parameter(gpu.tensor(torch.ones(ROWS, COLUMNS)))
        _kept = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=0.1))
        index = torch.tensor([1, 2])
        found = Lookup.apply(table, index) if hvd.rank() else table.index_select(0, index)
        with pytest.raises(MismatchError, match="ranks disagree on the layout"):
            found.sum().backward()

    on_gpus(2, body)


def test_sparse_reduction_waits_for_a_late_gradient_on_another_stream() -> None:
    def body(gpu: FakeDevice) -> Any:
        table = nn.Parameter(gpu.tensor(torch.ones(ROWS, COLUMNS)))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([table], lr=0.5), synchronize_in_backward=False
        )
        factor = gpu.tensor(torch.tensor(0.0))
        gpu.synchronize()
        with Factories(gpu):
            other = gpu.new_stream()
            with gpu.using(other):
                gpu.enqueue(lambda: time.sleep(0.05))
                factor.fill_(2.0)
                (Lookup.apply(table, torch.tensor([hvd.rank()])) * factor).sum().backward()
            optimizer.step()  # of the first step, which submits here
            gpu.await_stream(other)
            return table[:3].cpu()

    expected = torch.ones(3, COLUMNS)
    expected[:2] -= 0.5 * 2.0 / 2
    for found in on_gpus(2, body):
        assert torch.equal(found, expected)
