"""Comparison of parameters and options between ranks; strides may differ, and then are not used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sparkhvd.engine.engine import Work
from sparkhvd.errors import MismatchError
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.context import Context

__all__ = ["Agreement"]

_DIGEST_BYTES = 32

_T = TypeVar("_T")


class Agreement:
    """Compares parameters and options with those of the other ranks, without waiting for them until `check`.

    Every rank of the process set makes one. Two digests are compared; the texts follow only where digests differ.

    Args:
        context: whose engine compares.
        label: of the optimizer.
        process_set: the engine's number of the ranks.
        ranks: their global ranks, ascending.
        description: the options, then a sentence per parameter; must be equal on all ranks.
        strides: of every parameter's gradient.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        process_set: int,
        ranks: Sequence[int],
        description: list[str],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        self._context = context
        self._label = label
        self._process_set = process_set
        self._ranks = ranks
        self._description = description
        self._strides = [list(each) for each in strides]
        digests = _digest(description) + _digest(self._strides)
        self._digests = torch.tensor(list(digests), dtype=torch.uint8)
        self._work: Work = start_allgather(context, f"{label}.digest", self._digests, process_set)
        self._difference: str | None = None

    def check(self) -> None:
        """Wait for the other ranks' digests, which they send when they build the optimizer.

        Raises:
            MismatchError: parameters or options differ; on every rank, with the first difference.
        """
        if not bool(self._is_equal()[:, :_DIGEST_BYTES].all()):
            if self._difference is None:  # every rank exchanges once, however often it looks
                texts = self._exchange("description", self._description)
                self._difference = _difference(self._label, self._ranks, texts)
            raise MismatchError(self._difference)

    @property
    def has_equal_strides(self) -> bool:
        """Return True if all strides are the same on every rank, after `check`; on every rank the same answer."""
        return bool(self._is_equal().all())

    def differing_strides(self) -> list[int]:
        """Find strides that differ, after `check`; if there are any, every rank must call this.

        Returns:
            Numbers of the parameters whose strides differ between ranks; on every rank the same list.
        """
        if self.has_equal_strides:
            return []
        strides = self._exchange("strides", self._strides)
        return [
            i
            for i, each in enumerate(zip(*strides, strict=True))
            if any(s != each[0] for s in each)
        ]

    def _is_equal(self) -> Tensor:
        self._work.wait()
        digests = self._digests
        by_rank = gathered(self._work, digests.dtype, digests.shape)[0].view(-1, len(digests))
        return by_rank == digests

    def _exchange(self, what: str, value: _T) -> list[_T]:
        """Return the values of all ranks, in the order of ranks."""
        text: Tensor = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        work = start_allgather(self._context, f"{self._label}.{what}", text, self._process_set)
        work.wait()
        joined, rows = gathered(work, text.dtype, text.shape)
        return [json.loads(bytes(part.tolist())) for part in joined.split(list(rows))]


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()


def _difference(label: str, ranks: Sequence[int], descriptions: list[list[str]]) -> str:
    """Say where the first rank that differs from the set's first differs."""
    first = descriptions[0]
    place = next(place for place, texts in enumerate(descriptions) if texts != first)
    differing, rank = descriptions[place], ranks[place]
    advice = "Build the same model and the same optimizer, in the same order, on every rank."
    for number, (ours, theirs) in enumerate(zip(first, differing, strict=False)):
        if ours != theirs:
            what = "the options" if number == 0 else f"parameter {number - 1}"
            return f"{label}: ranks disagree on {what}. Rank {ranks[0]} has {ours}; rank {rank} has {theirs}. {advice}"
    return (
        f"{label}: ranks disagree on the number of parameters. Rank {ranks[0]} has {len(first) - 1}, "
        f"rank {rank} has {len(differing) - 1}. {advice}"
    )
