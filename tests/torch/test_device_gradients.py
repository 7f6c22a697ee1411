"""Use of `.grad` on GPUs between steps, with the stand-in for CUDA."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparkhvd.torch as hvd
from tests.harness import device_training as training
from tests.harness.fake_cuda import FakeDevice
from tests.torch.on_gpus import on_gpus
from tests.torch.test_device_optimizer import SMALL, of_row, uses_extra

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("fake_gpus")]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_with_new_memory_between_steps_are_reduced(
    set_to_none: bool, as_views: bool
) -> None:
    """`p.grad.data = ...` and `model.cpu()` give gradients other memory."""

    def body(gpu: FakeDevice) -> list[Any]:
        model: Any = gpu.module(nn.Linear(3, 2, bias=False).double())
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=as_views
        )
        found = []
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            x = torch.full((1, 3), (hvd.rank() + 1.0) * (step + 1), dtype=torch.float64)
            model(gpu.tensor(x)).sum().backward()
            optimizer.synchronize()
            found.append(model.weight.grad.tolist())
            model.weight.grad.data = model.weight.grad.clone()
            with optimizer.skip_synchronize():
                optimizer.step()
        return found

    assert on_gpus(2, body) == [[[[1.5 * (step + 1)] * 3] * 2 for step in range(5)]] * 2


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
def test_sharded_gradients_with_other_strides_give_the_right_step(compression: Any) -> None:
    def body(gpu: FakeDevice) -> Any:
        model: Any = gpu.module(training.fill(nn.Linear(3, 4, bias=False).double()))
        start = model.weight.tolist()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), sharded=True, compression=compression
        )
        values = gpu.tensor(torch.arange(12, dtype=torch.float64).view(3, 4)).t()
        for _ in range(2):
            optimizer.zero_grad()
            model.weight.grad = values.clone()
            optimizer.step()
        return torch.tensor(start) - torch.tensor(model.weight.tolist())

    expected = 2 * torch.arange(12, dtype=torch.float64).view(3, 4).t()
    for found in on_gpus(3, body):
        assert float((found - expected).abs().max()) < 1e-5


def test_gradients_rewritten_by_a_replayed_cuda_graph_are_reduced() -> None:
    """A replayed graph runs no hooks and writes to the memory that `.grad` had during the capture."""

    def body(gpu: FakeDevice) -> list[Any]:
        model: Any = gpu.module(nn.Linear(3, 2, bias=False).double())
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        captured = torch.zeros_like(model.weight.detach())  # as backward makes it: not shared
        model.weight.grad = captured
        found = []
        for step in range(4):
            captured.fill_((hvd.rank() + 1.0) * (step + 1))
            optimizer.step()
            found.append(model.weight.grad.tolist())
        return found

    assert on_gpus(2, body) == [[[[1.5 * (step + 1)] * 3] * 2 for step in range(4)]] * 2


class Thousandths(hvd.Compression.none):
    """A user's compressor, whose numbers are no gradients before they are decompressed."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 1000, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor / 1000


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_custom_compressor_works_with_layers_unused_on_some_ranks(
    set_to_none: bool, sharded: bool
) -> None:
    train = functools.partial(
        training.together,
        uses_extra=uses_extra,
        compression=Thousandths,
        set_to_none=set_to_none,
        sharded=sharded,
        make=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    expected = training.alone(
        extra_for=functools.partial(of_row, size=3),
        make=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    for found in on_gpus(3, train, settings=SMALL):
        assert float((found - expected).abs().max()) < 1e-9
