"""Random operations of the torch API in real processes, each rank in its own order and at its own pace."""

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

pytestmark = pytest.mark.processes

SECONDS = amount(1, 120)
OPERATIONS = 14
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
KINDS = (
    "allreduce",
    "registered",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
)
REGISTERED = 70_001  # elements


def inputs_of(seed: int, kind: str, rank: int) -> list[torch.Tensor]:
    """Return a rank's contribution: small whole numbers, so that every sum is exact in every dtype."""
    dice = random.Random(seed)
    size = dice.choice((0, 1, 5, 1000, REGISTERED, 400_000))
    dtype = dice.choice(DTYPES)
    if kind == "registered":
        size, dtype = min(size, REGISTERED), torch.float32
    rows = size + rank if "allgather" in kind else size
    count = 2 if "grouped" in kind else 1
    values = np.random.default_rng([seed, rank]).integers(-9, 10, (count, rows))
    return [torch.from_numpy(row).to(dtype) for row in values]


def splits_of(seed: int, ranks: list[int], rank: int) -> list[int]:
    """Return the number of rows that `rank` sends to each of `ranks` in an alltoall."""
    rows = len(inputs_of(seed, "alltoall", rank)[0])
    cuts = sorted(random.Random(seed * 1000 + rank).choices(range(rows + 1), k=len(ranks)))
    return [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


def expected_of(seed: int, kind: str, ranks: list[int], rank: int) -> list[torch.Tensor]:
    """Compute the expected result of `rank` in one process that sees every rank's input."""
    every = [inputs_of(seed, kind, r) for r in ranks]
    if "allgather" in kind:
        return [torch.cat(parts) for parts in zip(*every, strict=True)]
    if kind == "broadcast":
        return every[seed % len(ranks)]
    if kind == "alltoall":
        place = ranks.index(rank)
        parts = []
        for sender, (tensor,) in zip(ranks, every, strict=True):
            splits = splits_of(seed, ranks, sender)
            first = sum(splits[:place])
            parts.append(tensor[first : first + splits[place]])
        return [torch.cat(parts)]
    sums = [torch.stack(parts).sum(0).to(parts[0].dtype) for parts in zip(*every, strict=True)]
    if kind == "reducescatter":
        counts = [len(sums[0]) // len(ranks)] * len(ranks)
        for place in range(len(sums[0]) % len(ranks)):
            counts[place] += 1
        return [sums[0].split(counts)[ranks.index(rank)]]
    return sums


def start(seed: int, kind: str, process_set: Any, memory: torch.Tensor) -> Any:
    """Start the operation. The handle returns a tensor or several."""
    tensors = inputs_of(seed, kind, hvd.rank())
    arguments = {"name": f"{kind} {seed}", "process_set": process_set}
    if kind == "registered":
        part = memory[: len(tensors[0])]
        part.copy_(tensors[0])
        return hvd.allreduce_async_(part, op=hvd.Sum, **arguments)
    if kind == "grouped_allreduce":
        return hvd.grouped_allreduce_async(tensors, op=hvd.Sum, **arguments)
    if kind == "grouped_allgather":
        return hvd.grouped_allgather_async(tensors, **arguments)
    if kind == "allgather":
        return hvd.allgather_async(tensors[0], **arguments)
    if kind == "broadcast":
        root = process_set.ranks[seed % process_set.size()]
        return hvd.broadcast_async(tensors[0], root, **arguments)
    if kind == "alltoall":
        splits = splits_of(seed, process_set.ranks, hvd.rank())
        return hvd.alltoall_async(tensors[0], splits, **arguments)
    if kind == "reducescatter":
        return hvd.reducescatter_async(tensors[0], op=hvd.Sum, **arguments)
    return hvd.allreduce_async(tensors[0], op=hvd.Sum, **arguments)


def check(result: Any, seed: int, kind: str, process_set: Any) -> None:
    if kind == "alltoall":
        result = result[0]
    found = [result] if isinstance(result, torch.Tensor) else list(result)
    wanted = expected_of(seed, kind, process_set.ranks, hvd.rank())
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs), (seed, kind, process_set)


def work(seconds: float) -> int:
    """Run rounds of operations until rank 0 stops, and return their number."""
    hvd.init()
    size, own = hvd.size(), random.Random(hvd.rank())
    sets = [hvd.global_process_set]
    sets += [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, *range(2, size)]) if size > 2]
    memories = [
        hvd.registered_empty((REGISTERED,), process_set=s) if s.included() else None for s in sets
    ]
    until = time.monotonic() + seconds
    rounds = 0
    while True:
        shared = random.Random(rounds)
        kinds = [*shared.choices([k for k in KINDS if k != "registered"], k=OPERATIONS)]
        kinds[: len(sets)] = ["registered"] * len(sets)  # one per set, because it has one memory
        plan = [
            (rounds * OPERATIONS + i, kind, i if i < len(sets) else shared.randrange(len(sets)))
            for i, kind in enumerate(kinds)
        ]
        mine = [entry for entry in plan if sets[entry[2]].included()]
        handles = {}
        for seed, kind, index in own.sample(mine, len(mine)):
            memory = memories[index]
            assert memory is not None
            handles[seed] = start(seed, kind, sets[index], memory)
            if own.random() < 0.2:
                time.sleep(own.random() * 0.003)
        for seed, kind, index in own.sample(mine, len(mine)):
            while own.random() < 0.5 and not hvd.poll(handles[seed]):
                time.sleep(0)
            check(hvd.synchronize(handles[seed]), seed, kind, sets[index])
        rounds += 1
        if rounds % 3 == 0:
            uneven(rounds)
        go_on = torch.tensor([time.monotonic() < until])
        if not hvd.broadcast(go_on, 0, name=f"continue {rounds}"):
            break
    hvd.shutdown()
    return rounds


def uneven(rounds: int) -> None:
    """Train on this rank's own number of batches, then join."""
    batches = [random.Random(1000 * rounds + r).randrange(4) for r in range(hvd.size())]
    for batch in range(batches[hvd.rank()]):
        still = sum(batches[r] > batch for r in range(hvd.size()))
        found = hvd.allreduce(torch.ones(3000), op=hvd.Sum, name=f"batch {batch}")
        assert found.unique().tolist() == [still]
    assert batches[hvd.join()] == max(batches) or max(batches) == 0


@pytest.mark.timeout(SECONDS * 4 + 100)
@pytest.mark.usefixtures("zygote_has_torch")
@pytest.mark.parametrize(
    ("num_proc", "is_shared"),
    [(2, True), (3, True), (4, True), (4, False)] if SOAK else [(3, True), (2, False)],
)
def test_random_torch_operations_in_any_order_are_exact(num_proc: int, is_shared: bool) -> None:
    settings = Settings(shared_memory=is_shared, slot_bytes=65536, stall_shutdown_s=60)
    rounds = run_local(work, (SECONDS,), num_proc=num_proc, settings=settings)
    assert rounds == [rounds[0]] * num_proc
    assert rounds[0] >= 2
