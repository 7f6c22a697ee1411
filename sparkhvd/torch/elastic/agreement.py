"""What all ranks must know alike at a commit: how far each is, and whether the ranks should change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.errors import MismatchError
from sparkhvd.torch.collectives import Sum, allreduce
from sparkhvd.torch.context import context
from sparkhvd.torch.elastic.sampler import ElasticSampler, Progress

__all__ = ["Agreed", "agree", "rendezvous"]

# Columns of a rank's row: 1, whether it wants a change, whether that is more than removals; then of each sampler three.
_PRESENT, _CHANGE, _JOIN, _FIRST = 0, 1, 2, 3
_EPOCH, _COUNT, _IRREGULAR, _WIDTH = 0, 1, 2, 3


@dataclass(frozen=True)
class Agreed:
    """Result of an agreement, the same on every rank.

    Attributes:
        should_change: whether the ranks should change now.
        only_removals: whether nobody would join.
    """

    should_change: bool
    only_removals: bool


def rendezvous() -> ElasticRendezvous | None:
    """Return this member's rendezvous; None in a job whose ranks do not change."""
    current = context().rendezvous
    return current if isinstance(current, ElasticRendezvous) else None


def agree(samplers: Sequence[ElasticSampler], should_change: bool, only_removals: bool) -> Agreed:
    """Exchange how far the ranks are, and whether one of them wants a change; every rank must call this with as many samplers.

    A rank that has joined (`hvd.join()`) has recorded all of its rows.

    Raises:
        MismatchError: a sampler is in different epochs on different ranks.
        CollectiveError: the set of ranks changed.
    """
    place = context().engine.topology
    rows = torch.zeros(place.size, _FIRST + _WIDTH * len(samplers), dtype=torch.int64)
    own = rows[place.rank]
    own[_PRESENT], own[_CHANGE] = 1, int(should_change)
    own[_JOIN] = int(should_change and not only_removals)
    for number, sampler in enumerate(samplers):
        count, is_regular = sampler.progress()
        entry = torch.tensor((sampler.epoch, count, int(not is_regular)))
        own[_FIRST + _WIDTH * number :][:_WIDTH] = entry
    rows = allreduce(rows, op=Sum, name="elastic.commit")
    present = rows[rows[:, _PRESENT] > 0]
    for number, sampler in enumerate(samplers):
        columns = rows[:, _FIRST + _WIDTH * number :][:, :_WIDTH]
        _check_epochs(columns, rows[:, _PRESENT])
        sampler.agree(_progress(sampler, columns, rows[:, _PRESENT], f"elastic.progress.{number}"))
    totals = present.sum(dim=0)
    return Agreed(bool(totals[_CHANGE]), not bool(totals[_JOIN]))


def _check_epochs(columns: Tensor, present: Tensor) -> None:
    ranks = torch.nonzero(present).flatten().tolist()
    epochs = {rank: int(columns[rank, _EPOCH]) for rank in ranks}
    first = ranks[0]
    for rank, epoch in epochs.items():
        if epoch != epochs[first]:
            raise MismatchError(
                f"ElasticSampler: rank {first} is in epoch {epochs[first]}, rank {rank} in epoch {epoch}. One had a batch more than the "
                "other: give the loader batch_sampler=sampler.batches(...) and take its num_steps on every rank, or give it the sampler and a batch size."
            )


def _progress(sampler: ElasticSampler, columns: Tensor, present: Tensor, name: str) -> Progress:
    counts = [
        int(columns[rank, _COUNT]) if present[rank] else sampler.share_of(rank)
        for rank in range(len(columns))
    ]
    if not bool(columns[:, _IRREGULAR].any()):
        return Progress(tuple(counts))
    marks = allreduce(sampler.marks_of_all(), op=Sum, name=name)
    joined = [0 if present[rank] else counts[rank] for rank in range(len(columns))]
    return Progress(tuple(joined), frozenset(torch.nonzero(marks).flatten().tolist()))
