"""Which rows each rank sees at each step: pure functions of (rows, size, rank, batch size, seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Plan", "epoch_plan", "split_validation"]

Rows = npt.NDArray[np.int64]


def split_validation(num_rows: int, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split row numbers 0..num_rows-1 into (train, validation), each ascending, by a seeded permutation."""
    raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """One epoch: the rows of every rank and step. Every rank computes the same plan."""

    size: int
    batch_size: int
    num_rows: int

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, equal on every rank."""
        raise NotImplementedError

    def rows_per_rank(self, step: int) -> tuple[int, ...]:
        """How many rows each rank has in a step."""
        raise NotImplementedError

    def batch_rows(self, rank: int, step: int) -> Rows:
        """Row numbers of a rank's batch."""
        raise NotImplementedError

    def windows(self, rank: int) -> Iterator[Rows]:
        """The rank's rows in order, in pieces that fit the memory bound."""
        raise NotImplementedError


def epoch_plan(
    rows: Rows | int,
    *,
    size: int,
    batch_size: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    drop_last: bool = False,
    window_rows: int | None = None,
    block_rows: int | None = None,
) -> Plan:
    """The plan of one epoch over the given row numbers (or 0..rows-1)."""
    raise NotImplementedError
