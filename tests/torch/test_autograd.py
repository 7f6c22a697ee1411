from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import InvalidArgumentError
from tests.torch.on_ranks import on_ranks

pytestmark = pytest.mark.ranks


def weights(rank: int, count: int) -> torch.Tensor:
    return torch.arange(1.0, count + 1) * (rank + 1)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_gradient_of_allreduce_is_the_same_reduction(op: Any) -> None:
    def body() -> Any:
        x = torch.ones(3, requires_grad=True)
        y = hvd.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.5)
        (y * weights(hvd.rank(), 3)).sum().backward()
        total = weights(0, 3) + weights(1, 3)
        assert torch.allclose(x.grad, total if op == hvd.Sum else total / 2)

    on_ranks(2, body)


def test_gradient_of_grouped_allreduce_is_the_same_reduction() -> None:
    def body() -> Any:
        a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        ra, rb = hvd.grouped_allreduce([a, b], op=hvd.Sum, name="pair")
        (ra.sum() * (hvd.rank() + 1) + rb.sum()).backward()
        return a.grad.tolist(), b.grad.tolist()

    assert on_ranks(2, body) == [([3.0, 3.0], [2.0, 2.0, 2.0])] * 2


def test_gradient_flows_through_compression() -> None:
    def body() -> Any:
        x = torch.ones(2, requires_grad=True)
        hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
        return x.grad.dtype, x.grad.tolist()

    assert on_ranks(2, body) == [(torch.float32, [2.0, 2.0])] * 2


def test_backward_of_reductions_without_gradient_raises() -> None:
    def body() -> Any:
        x = torch.ones(2, requires_grad=True)
        y = hvd.allreduce(x, op=hvd.Max)
        with pytest.raises(InvalidArgumentError, match="has no gradient"):
            y.sum().backward()

    on_ranks(2, body)


def test_gradient_of_allgather_is_the_average_for_own_rows() -> None:
    def body() -> Any:
        rows = hvd.rank() + 1
        x = torch.ones(rows, 2, requires_grad=True)
        y = hvd.allgather(x)
        (y * weights(hvd.rank(), 6).view(3, 2)).sum().backward()
        average = (weights(0, 6) + weights(1, 6)).view(3, 2) / 2
        assert torch.equal(x.grad, average[:1] if hvd.rank() == 0 else average[1:])

    on_ranks(2, body)


def test_gradient_of_broadcast_is_the_average_on_the_root_only() -> None:
    def body() -> Any:
        x = torch.ones(3, requires_grad=True)
        (hvd.broadcast(x, 1) * weights(hvd.rank(), 3)).sum().backward()
        return x.grad.tolist()

    assert on_ranks(2, body) == [[0.0] * 3, [1.5, 3.0, 4.5]]


@pytest.mark.parametrize(
    ("reduce", "factor"),
    [
        # y = 2x on both ranks, and every gradient comes twice: 48x of y**3, 6x of x**3.
        (lambda x: hvd.allreduce(x, op=hvd.Sum), 54.0),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), 54.0),
        (lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, name="one")[0], 54.0),
        (lambda x: hvd.allreduce(x), 12.0),
        (lambda x: hvd.alltoall(x), 12.0),
        (lambda x: hvd.alltoall(x, [1, 1], name="rows")[0], 12.0),
    ],
)
def test_second_derivatives_of_collectives_are_right(
    reduce: Callable[[torch.Tensor], torch.Tensor], factor: float
) -> None:
    def body() -> Any:
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        loss = (reduce(x) ** 3).sum() + (x**3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second.tolist()

    assert on_ranks(2, body) == [[2.0 * factor, 3.0 * factor]] * 2


def test_no_graph_is_built_without_grad() -> None:
    def body() -> Any:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
        assert hvd.allreduce(x).requires_grad

    on_ranks(1, body)
