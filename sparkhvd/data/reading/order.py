"""Order of a reader's rows, epoch by epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkhvd.data.columns.ragged import Rows
from sparkhvd.data.reading.sampler import SamplingPlan, Stage, epoch_plan, permutation
from sparkhvd.data.reading.subset import count_of, fits_in_memory, group_plan
from sparkhvd.errors import InvalidArgumentError

# Rows of several steps are gathered at once into a chunk of this size, so that a step costs only a few views in Python.
CHUNK_BYTES = 1 << 20
# Size of the blocks that are shuffled if rows do not fit in memory; large enough to read at disk speed.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class RowOrder:
    """Planner of a reader's epochs, equal on all ranks.

    Attributes:
        rows: ascending numbers of the subset's rows in the files, or a count for all, starting at 0.
        row_bytes: bytes of a row.
        size: number of ranks.
        batch_size: rows per rank and step.
        seed: decides the order, with the epoch.
        shuffle: a new permutation each epoch; False keeps file order.
        drop_last: drop the final global batch if it is not full.
        shuffle_bytes: rows up to this many bytes are held in memory; beyond it, the bound on a window.
        edges: row numbers that the source prefers as block edges; None if any row can be read alone.
        groups: positions in the subset at which groups begin, see `group_edges`; None without groups.
    """

    rows: Rows | int
    row_bytes: int
    size: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    shuffle_bytes: int
    edges: Rows | None
    groups: Rows | None = None

    @functools.cached_property
    def is_resident(self) -> bool:
        """True if all rows of the subset are held in memory."""
        return fits_in_memory(self.rows, self.row_bytes, self.shuffle_bytes)

    @property
    def num_rows(self) -> int:
        """Rows of the subset, over all ranks."""
        return count_of(self.rows)

    @property
    def windows(self) -> list[int]:
        """Parameters of the row order besides a loader's options, or [] if the rows are in memory.

        Otherwise rows of a window and of a block, if shuffled, and `drop_last` as 0 or 1.
        """
        if self.is_resident:
            return []
        lengths = [self._file_window(), self._block_rows] if self.shuffle else []
        return [*lengths, int(self.drop_last)]  # with `drop_last`, each rank's part is shorter

    @property
    def _window_rows(self) -> int:
        return max(1, self.shuffle_bytes // max(1, self.row_bytes))

    @property
    def _block_rows(self) -> int:
        return min(max(1, _BLOCK_BYTES // max(1, self.row_bytes)), max(1, self._window_rows // 16))

    def plan(self, epoch: int, first_row: int = 0) -> SamplingPlan:
        """Plan an epoch, with row numbers of the files."""
        return self._plan(epoch, self.rows, None, first_row)

    def held_plan(
        self,
        epoch: int,
        permute: Callable[[], Rows] | None = None,
        first_row: int = 0,
        before: Sequence[Stage] = (),
    ) -> SamplingPlan:
        """Plan an epoch, with row numbers of the subset if it is held in memory.

        Args:
            epoch: counts from 0.
            permute: returns the epoch's permutation; None computes it on demand.
            first_row: see `epoch_plan`.
            before: see `epoch_plan`.

        Raises:
            InvalidArgumentError: the epoch cannot resume with these arguments, because its rows are in groups or do not
                fit in memory.
        """
        rows = self.num_rows if self.is_resident else self.rows
        return self._plan(epoch, rows, permute, first_row, before)

    def _plan(
        self,
        epoch: int,
        rows: Rows | int,
        permute: Callable[[], Rows] | None,
        first_row: int = 0,
        before: Sequence[Stage] = (),
    ) -> SamplingPlan:
        block_rows = self._block_rows
        if self.groups is not None and (first_row or before):
            raise InvalidArgumentError(
                "Batches of whole groups depend on the number of ranks and the batch size: resume with the same numbers."
            )
        if self.groups is not None:
            return group_plan(
                rows,
                self.groups,
                size=self.size,
                batch_size=self.batch_size,
                seed=self.seed,
                epoch=epoch,
                shuffle=self.shuffle,
                window_rows=None if self.is_resident else self._file_window(),
                block_rows=block_rows,
            )
        return epoch_plan(
            rows,
            size=self.size,
            batch_size=self.batch_size,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            window_rows=None if self.is_resident else self._file_window(),
            block_rows=block_rows,
            block_edges=None if self.is_resident else self._block_edges(block_rows),
            permute=permute or functools.partial(permutation, self.num_rows, self.seed, epoch),
            first_row=first_row,
            before=before,
        )

    def _block_edges(self, block_rows: int) -> Rows | None:
        """Convert the source's edges to positions in the subset, and join small blocks, or return None without edges."""
        if self.edges is None:
            return None
        edges = self.edges
        if not isinstance(self.rows, int):
            edges = np.searchsorted(self.rows, edges)
        kept = [0]
        for edge in edges[:-1]:
            if edge - kept[-1] >= block_rows:
                kept.append(int(edge))
        return np.array([*kept, self.num_rows], np.int64)

    def _file_window(self) -> int:
        """Rows of a window of data beyond memory: as many as allowed if shuffled, a few chunks in file order."""
        chunk = 8 * CHUNK_BYTES // max(1, self.row_bytes)
        return self._window_rows if self.shuffle else max(1, min(chunk, self._window_rows))

    def describe(self) -> str:
        """Describe the order in words, for the report."""
        if self.groups is not None:
            return self._describe_groups(np.diff(self.groups))
        if self.is_resident:
            return "uniform permutation in memory" if self.shuffle else "file order in memory"
        if not self.shuffle:
            return "file order, one contiguous shard per rank"
        return (
            f"blocks in random order, rows permuted inside windows of {self._window_rows:,} "
            f"of {self.num_rows:,} rows (raise shuffle_bytes for a uniform permutation)"
        )

    def _describe_groups(self, lengths: Rows) -> str:
        longest = int(lengths.max(initial=0))
        order = "random" if self.shuffle else "file"
        where = "" if self.is_resident else f", inside windows of {self._file_window():,} rows"
        above = f": cut, because batch_size is {self.batch_size:,}"
        cut = above if longest > self.batch_size else ""
        return (
            f"{len(lengths):,} groups in {order} order{where}, the longest of {longest:,} rows{cut}"
        )
