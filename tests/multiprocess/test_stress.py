"""Random operations in real processes, each rank in an order and at a pace of its own."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.runner import run_local
from sparkhvd.settings import Settings
from tests.harness.soak import SOAK, amount

SECONDS = amount(4, 240)
OPERATIONS = 12
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def inputs_of(seed: int, kind: str, rank: int) -> torch.Tensor:
    """What a rank contributes: small whole numbers, so that every sum is exact in every dtype."""
    dice = random.Random(seed)
    size = dice.choice((0, 1, 5, 1000, 70_001, 400_000))
    dtype = dice.choice(DTYPES)
    rows = size + rank if kind == "allgather" else size
    values = np.random.default_rng([seed, rank]).integers(-9, 10, rows)
    return torch.from_numpy(values).to(dtype)


def expected_of(seed: int, kind: str, size: int) -> torch.Tensor:
    every = [inputs_of(seed, kind, rank) for rank in range(size)]
    if kind == "allgather":
        return torch.cat(every)
    return (
        every[seed % size] if kind == "broadcast" else torch.stack(every).sum(0).to(every[0].dtype)
    )


def start(seed: int, kind: str) -> Any:
    tensor = inputs_of(seed, kind, hvd.rank())
    if kind == "allgather":
        return hvd.allgather_async(tensor, name=str(seed))
    if kind == "broadcast":
        return hvd.broadcast_async(tensor, seed % hvd.size(), name=str(seed))
    return hvd.allreduce_async(tensor, name=str(seed), op=hvd.Sum)


def work(seconds: float) -> int:
    """Rounds of operations until rank 0 has had enough; returns how many."""
    hvd.init()
    own = random.Random(hvd.rank())
    until = time.monotonic() + seconds
    rounds = 0
    while True:
        shared = random.Random(rounds)
        plan = [
            (rounds * OPERATIONS + i, shared.choice(("allreduce", "allgather", "broadcast")))
            for i in range(OPERATIONS)
        ]
        handles = {}
        for seed, kind in own.sample(plan, len(plan)):
            handles[seed] = start(seed, kind)
            if own.random() < 0.2:
                time.sleep(own.random() * 0.003)
        for seed, kind in own.sample(plan, len(plan)):
            while own.random() < 0.5 and not hvd.poll(handles[seed]):
                time.sleep(0)
            result = hvd.synchronize(handles[seed])
            assert torch.equal(result, expected_of(seed, kind, hvd.size())), (seed, kind)
        rounds += 1
        go_on = torch.tensor([time.monotonic() < until])
        if not hvd.broadcast(go_on, 0, name=f"go on {rounds}"):
            break
    hvd.shutdown()
    return rounds


@pytest.mark.timeout(SECONDS * 4 + 100)
@pytest.mark.parametrize(
    ("num_proc", "is_shared"),
    [(2, True), (3, True), (3, False)] if SOAK else [(3, True), (2, False)],
)
def test_random_operations_in_any_order_are_exact(num_proc: int, is_shared: bool) -> None:
    settings = Settings(shared_memory=is_shared, slot_bytes=65536, stall_shutdown_s=60)
    rounds = run_local(work, (SECONDS,), num_proc=num_proc, settings=settings)
    assert rounds == [rounds[0]] * num_proc
    assert rounds[0] >= 2
