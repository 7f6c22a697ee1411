"""Parameters and gradients that change their memory, shape or object while they are being reduced."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sparkhvd.torch as hvd
from tests.unit.torch.on_ranks import on_ranks


class Watched:
    """Memory of which one sees whether torch still holds it. It is not freed, so nothing is written after a free."""

    def __init__(self, count: int) -> None:
        self.memory = np.zeros(count, np.float32)
        view = self.memory[:]
        self._view = weakref.ref(view)
        self.tensor: torch.Tensor | None = torch.from_numpy(view)

    @property
    def is_held(self) -> bool:
        gc.collect()
        return self._view() is not None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_gradient_in_flight_that_gets_other_memory_keeps_its_own(sharded: bool) -> None:
    rank_0_has_looked = threading.Event()

    def body() -> Any:
        p = nn.Parameter(torch.zeros(10))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), sharded=sharded)
        p.sum().backward()
        optimizer.step()  # the first cycle submits in step()
        optimizer.zero_grad()
        watched = Watched(10)
        p.grad, watched.tensor = watched.tensor, None
        try:
            if hvd.rank() == 1:
                assert rank_0_has_looked.wait(30)
            p.sum().backward()
            p.grad.data = p.grad.data.clone()
            was_held = hvd.rank() == 1 or watched.is_held
        finally:
            rank_0_has_looked.set()
        optimizer.zero_grad()
        return was_held, watched.is_held

    assert on_ranks(2, body) == [(True, False)] * 2


@pytest.mark.parametrize(
    "start",
    [
        lambda tensor: hvd.allreduce_async_(tensor),
        lambda tensor: hvd.grouped_allreduce_async_([tensor]),
        lambda tensor: hvd.broadcast_async_(tensor, 0),
        lambda tensor: hvd.allreduce_async(tensor),
        lambda tensor: hvd.allgather_async(tensor),
        lambda tensor: hvd.alltoall_async(tensor),
        lambda tensor: hvd.reducescatter_async(tensor),
        lambda tensor: hvd.broadcast_async(tensor, 0),
    ],
)
def test_a_tensor_in_flight_that_gets_other_memory_keeps_its_own(
    start: Callable[[torch.Tensor], hvd.Handle],
) -> None:
    rank_0_has_looked = threading.Event()

    def body() -> Any:
        watched = Watched(10)
        tensor, watched.tensor = watched.tensor, None
        assert tensor is not None
        try:
            if hvd.rank() == 1:
                assert rank_0_has_looked.wait(30)
            handle = start(tensor)
            tensor.data = torch.zeros(10)
            was_held = hvd.rank() == 1 or watched.is_held
        finally:
            rank_0_has_looked.set()
        hvd.synchronize(handle)
        return was_held, watched.is_held

    assert on_ranks(2, body) == [(True, False)] * 2
