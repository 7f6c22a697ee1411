"""From a manifest to the batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkhvd.estimator.manifest import Manifest
from sparkhvd.estimator.store import Store

__all__ = ["Batch", "Reader"]


@dataclass(frozen=True)
class Batch:
    """The rows of one rank at one step.

    Attributes:
        columns: by name, arrays of shape (rows, *shape of the column); writable, not shared with other batches.
        num_rows: rows of this rank, possibly 0.
        rows_per_rank: rows of every rank at this step, known without communication.
        step: counts from 0 in each epoch.
    """

    columns: dict[str, npt.NDArray[Any]]
    num_rows: int
    rows_per_rank: tuple[int, ...]
    step: int


class Reader:
    """Yields the batches of one rank, epoch by epoch; a context manager.

    Every rank yields the same number of steps, and every row of the subset appears exactly once per epoch
    over all ranks.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        rank: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        subset: str = "all",
        validation: float | None = None,
        drop_last: bool = False,
        columns: Sequence[str] | None = None,
        shuffle_bytes: int = 1 << 30,
        prefetch_bytes: int = 16 << 20,
    ) -> None:
        """Open the data for one rank; reads nothing but what decides the subset.

        Args:
            store: where the data are.
            manifest: which files make them.
            rank: this rank.
            size: number of ranks.
            batch_size: rows per rank and step.
            seed: decides the split and, with the epoch, the order.
            shuffle: a new permutation each epoch; False keeps file order.
            subset: "all", "train" or "validation".
            validation: the validation fraction; None if the manifest has a validation column (or there is none).
            drop_last: leave out the final global batch if it is not full.
            columns: names to read; None means features, labels and sample weight.
            shuffle_bytes: data up to this many bytes are held in memory and permuted uniformly; beyond it, blocks
                come in random order and rows are permuted inside windows of this size.
            prefetch_bytes: batches prepared ahead by a background thread.
        """
        self.num_rows = 0
        self.num_steps = 0
        self.description = ""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch in order."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the background thread and release files and memory."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unused() -> Any:
    return np
