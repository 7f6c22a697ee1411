"""Random programs of asynchronous collectives, messages and groups, compared with a simulation of all ranks."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLOTS, STEPS = 5, 25
Rows = list[Tensor]  # a slot of each rank


class Program:
    """One program: every rank draws the same steps, and knows the expected slots of all ranks."""

    def __init__(self, seed: int, groups: list[tuple[Any, list[int]]]) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        made = torch.Generator().manual_seed(seed)
        length = 12 * self.random.choice([1, 7, 5000])
        self.slots = [
            [torch.randint(0, 9, (length,), generator=made) for _ in range(self.size)]
            for _ in range(SLOTS)
        ]
        self.own = [rows[self.rank].clone() for rows in self.slots]
        self.works: list[list[Any]] = [[] for _ in range(SLOTS)]

    def run(self) -> bool:
        """Return True if this rank holds what the simulation does."""
        for _ in range(STEPS):
            slot = self.random.randrange(SLOTS)
            group, ranks = self.random.choice(self.groups)
            step = self.random.choice([self.reduce, self.broadcast, self.exchange, self.message])
            root, keeps = self.random.choice(ranks), self.random.random() < 0.7
            self.finish(slot)
            work = step(slot, group, ranks, root)
            if work is not None:
                self.works[slot].append(work)
            if not keeps:
                self.finish(slot)
        for slot in self.random.sample(range(SLOTS), SLOTS):
            self.finish(slot)
        return all(
            torch.equal(own, rows[self.rank])
            for own, rows in zip(self.own, self.slots, strict=True)
        )

    def finish(self, slot: int) -> None:
        for work in self.works[slot]:
            work.wait()
        self.works[slot].clear()

    def reduce(self, slot: int, group: Any, ranks: list[int], _: int) -> Any:
        rows: Rows = self.slots[slot]
        largest = torch.stack([rows[rank] for rank in ranks]).amax(0)
        for rank in ranks:
            rows[rank] = largest.clone()
        if self.rank in ranks:
            return dist.all_reduce(self.own[slot], dist.ReduceOp.MAX, group, async_op=True)
        return None

    def broadcast(self, slot: int, group: Any, ranks: list[int], root: int) -> Any:
        rows = self.slots[slot]
        for rank in ranks:
            rows[rank] = rows[root].clone()
        if self.rank in ranks:
            return dist.broadcast(self.own[slot], root, group, async_op=True)
        return None

    def exchange(self, slot: int, group: Any, ranks: list[int], _: int) -> Any:
        rows = self.slots[slot]
        parts = [rows[rank].view(len(ranks), -1) for rank in ranks]
        for place, rank in enumerate(ranks):
            rows[rank] = torch.cat([part[place] for part in parts])
        if self.rank not in ranks:
            return None
        source, self.own[slot] = self.own[slot], torch.empty_like(self.own[slot])
        return dist.all_to_all_single(self.own[slot], source, group=group, async_op=True)

    def message(self, slot: int, group: Any, ranks: list[int], root: int) -> Any:
        """Send the root's slot to the next rank."""
        after = ranks[(ranks.index(root) + 1) % len(ranks)]
        rows, tag = self.slots[slot], self.random.randrange(3)
        if after == root:
            return None
        rows[after] = rows[root].clone()
        if self.rank == root:
            return dist.isend(self.own[slot], after, group, tag=tag)
        return dist.irecv(self.own[slot], root, group, tag=tag) if self.rank == after else None


def wrong(seeds: range) -> list[str]:
    """Return the programs whose result differs on this rank."""
    size = dist.get_world_size()
    lists = [list(range(size)), [0, size - 1] if size > 2 else list(range(size))]
    groups = [(dist.new_group(ranks), ranks) for ranks in lists]
    return [f"program {seed}" for seed in seeds if not Program(seed, groups).run()]
