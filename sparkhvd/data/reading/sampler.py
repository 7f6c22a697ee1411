"""Plan the rows of each rank and step: pure functions of (rows, size, rank, batch size, seed, epoch).

Global batch `s` is the rows of all ranks at step `s`. Every global batch except the last holds size * batch_size
rows. The last is levelled over the ranks, with one row more if that row would otherwise be a separate step. Three
orders:

- file order in memory (`shuffle=False`): global batch `s` is rows `[s * G, (s + 1) * G)` with
  `G = size * batch_size`, and each rank has one contiguous slice of it;
- uniform: the same slices of one permutation of all rows.

In these two, N ranks with batch b see at every step what one process with batch N * b sees. Data beyond memory
(`window_rows` given) are read by each rank only in its own contiguous part, about 1/N of them, so the rows of
a global batch depend on the number of ranks:

- file order beyond memory: rank `r` reads the `r`-th contiguous shard of the rows from front to back;
- blocks: blocks of neighbouring rows are in random order, rank `r` reads the `r`-th contiguous part of that
  sequence, and rows are permuted inside windows of `window_rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from sparkhvd.data.columns.ragged import Rows
from sparkhvd.errors import InvalidArgumentError

# Purposes of random streams, so that two uses of one seed never share a stream.
_SPLIT, _ORDER, _WINDOW = 1, 2, 3


def random_stream(*key: int) -> np.random.Generator:
    """Return the random stream of a key, the same on every machine."""
    return np.random.Generator(np.random.PCG64([k & (2**64 - 1) for k in key]))


def validation_count(num_rows: int, fraction: float) -> int:
    """Return the number of rows of a validation fraction above 0; both sides get at least one."""
    return min(max(round(num_rows * fraction), 1), num_rows - 1) if num_rows else 0


def split_validation(num_rows: int, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split row numbers into (train, validation), each ascending, by a seeded permutation.

    A fraction above 0 gives at least one row to each side.

    Raises:
        InvalidArgumentError: there are too few rows for both sides.
    """
    if fraction <= 0:
        return np.arange(num_rows, dtype=np.int64), np.empty(0, dtype=np.int64)
    if num_rows == 1:
        raise InvalidArgumentError(
            f"validation={fraction}: the data have 1 row, which cannot be split. Give more rows, or no validation."
        )
    held_out = validation_count(num_rows, fraction)
    order = random_stream(seed, _SPLIT).permutation(num_rows)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def level(num_rows: int, size: int, batch_size: int) -> tuple[int, ...]:
    """Return the rows per rank of a final global batch of `num_rows` <= size * batch_size + 1.

    If possible, no rank gets exactly one row (BatchNorm cannot train on one row): fewer ranks then share
    the rows, with at most one row more than `batch_size` on one of them. A batch size of 1 always means one row.
    """
    ranks = size if batch_size == 1 or num_rows >= 2 * size else max(1, num_rows // 2)
    each, extra = divmod(num_rows, ranks)
    return tuple(each + (r < extra) if r < ranks else 0 for r in range(size))


def cuts(length: int, unit: int, last: int) -> list[tuple[int, int]]:
    """Cut `length` rows into ranges of `unit`, keeping the last step's `last` rows together."""
    inner = [c for c in range(unit, length, unit) if length - c >= last]
    edges = [0, *inner, length]
    return [(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]


@dataclass(frozen=True)
class Window:
    """Consecutive rows of a rank's order.

    Attributes:
        rows: ascending row numbers, as read; None means all rows, whose numbers are in `order`.
        order: permutation of `rows`; None keeps them ascending.
    """

    rows: Rows | None
    order: Rows | None

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        numbers = self.rows if self.order is None else self.order
        assert numbers is not None
        return len(numbers)

    def row_numbers(self) -> Rows:
        """Return the row numbers in the order of the batches."""
        if self.rows is None:
            assert self.order is not None
            return self.order
        return self.rows if self.order is None else self.rows[self.order]

    def without_first(self, count: int) -> Window:
        """Return the window without the first `count` rows of its order, which are then not read."""
        if self.rows is None:
            assert self.order is not None
            return Window(None, self.order[count:])
        if self.order is None:
            return Window(self.rows[count:], None)
        kept = np.sort(self.order[count:])
        return Window(self.rows[kept], np.searchsorted(kept, self.order[count:]))


@dataclass(frozen=True)
class SamplingPlan:
    """Rows of every rank and step of an epoch. Every rank computes the same plan.

    Attributes:
        size: number of ranks.
        batch_size: rows per rank and step.
        num_rows: rows that the epoch uses.
        num_full_steps: steps in which every rank has `batch_size` rows.
        last_counts: rows per rank of the following partial step, or empty.
        first_row: rows of the order, over all ranks, before step 0, for a resumed epoch.
    """

    size: int
    batch_size: int
    num_rows: int
    num_full_steps: int
    last_counts: tuple[int, ...]
    _order: SampleOrder = field(repr=False)
    first_row: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, equal on every rank."""
        return self.num_full_steps + bool(self.last_counts)

    def rows_per_rank(self, step: int) -> tuple[int, ...]:
        """Return the number of rows of each rank in a step."""
        self.check_step(step)
        return (self.batch_size,) * self.size if step < self.num_full_steps else self.last_counts

    def check_step(self, step: int) -> None:
        """Reject a step that the epoch does not have."""
        if not 0 <= step < self.num_steps:
            raise InvalidArgumentError(
                f"Step {step} does not exist: the epoch has {self.num_steps} steps."
            )

    def windows(self, rank: int, start_step: int = 0) -> Iterator[Window]:
        """Yield the rank's rows in order, in pieces of whole batches (except at the end) within the memory bound.

        With `start_step`, only the rows from that step: earlier rows are neither planned nor read.
        """
        for window in self._order.windows(self, rank, self.rows_before(rank, start_step)):
            if window.num_rows:
                yield window
            del window

    def rows_before(self, rank: int, step: int) -> int:
        """Return the number of a rank's rows in the steps before `step`."""
        last = self.last_counts[rank] if step > self.num_full_steps else 0
        return min(step, self.num_full_steps) * self.batch_size + last

    def cuts(self, rank: int, start: int, length: int, unit: int) -> list[tuple[int, int]]:
        """Cut `length` rows of a rank, after its first `start`, into ranges of about `unit` rows, whole batches."""
        del start
        return cuts(length, unit, self.last_counts[rank] if self.last_counts else 0)


@dataclass(frozen=True)
class SampleOrder:
    """Order of rows."""

    rows: Rows | int

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        """Yield the rank's rows without its first `start`."""
        raise NotImplementedError


def numbers_at(rows: Rows | int, positions: Rows) -> Rows:
    """Return the row numbers at these positions of a selection."""
    return positions if isinstance(rows, int) else rows[positions]


def _sliced(plan: SamplingPlan, rank: int) -> Rows:
    """Return the positions of a rank in the global sequence: its slice of every global batch."""
    width = plan.size * plan.batch_size
    starts = np.arange(plan.num_full_steps, dtype=np.int64) * width + rank * plan.batch_size
    starts += plan.first_row
    positions = (starts[:, None] + np.arange(plan.batch_size, dtype=np.int64)).ravel()
    if not plan.last_counts:
        return positions
    start = plan.first_row + plan.num_full_steps * width + sum(plan.last_counts[:rank])
    tail = np.arange(start, start + plan.last_counts[rank], dtype=np.int64)
    return np.concatenate([positions, tail])


def permutation(num_rows: int, seed: int, epoch: int) -> Rows:
    """Return the order of an epoch's rows held in memory, over all ranks."""
    return random_stream(seed, _ORDER, epoch).permutation(num_rows)


@dataclass(frozen=True)
class _Uniform(SampleOrder):
    permute: Callable[[], Rows]

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        order = self.permute()
        yield Window(None, numbers_at(self.rows, order[_sliced(plan, rank)[start:]]))


@dataclass(frozen=True)
class _Interleaved(SampleOrder):
    """File order in memory: every rank has its slice of every global batch."""

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        yield Window(numbers_at(self.rows, _sliced(plan, rank)[start:]), None)


def _shard(plan: SamplingPlan, rank: int) -> tuple[int, int, int]:
    """Return (first, last + 1, rows of the last step) of a rank's contiguous part of a sequence of rows."""
    last = plan.last_counts or (0,) * plan.size
    full = plan.num_full_steps * plan.batch_size
    begin = full * rank + sum(last[:rank])
    return begin, begin + full + last[rank], last[rank]


@dataclass(frozen=True)
class _Shards(SampleOrder):
    """File order beyond memory: every rank reads one contiguous shard, window by window."""

    window_rows: int

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        begin, end, last = _shard(plan, rank)
        window = max(1, self.window_rows // plan.batch_size) * plan.batch_size
        for first, stop in cuts(end - begin, window, last):
            if stop > start:
                first = max(first, start)
                positions = np.arange(begin + first, begin + stop, dtype=np.int64)
                yield Window(numbers_at(self.rows, positions), None)


@dataclass(frozen=True)
class _Blocks(SampleOrder):
    seed: int
    epoch: int
    window_rows: int
    block_rows: int
    block_edges: Rows | None = None

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        num_rows = self.rows if isinstance(self.rows, int) else len(self.rows)
        edges = self.block_edges
        if edges is None:
            edges = np.append(np.arange(0, num_rows, self.block_rows, dtype=np.int64), num_rows)
        blocks = random_stream(self.seed, _ORDER, self.epoch).permutation(len(edges) - 1)
        first_row = edges[blocks]
        ends = np.cumsum(edges[blocks + 1] - first_row)
        begin, end, last = _shard(plan, rank)
        # Whole batches per window, so that no batch spans two.
        window = max(1, self.window_rows // plan.batch_size) * plan.batch_size
        for number, (first, stop) in enumerate(cuts(end - begin, window, last)):
            if stop <= start:
                continue
            positions = _pieces(first_row, ends, begin + first, begin + stop)
            order = random_stream(self.seed, _WINDOW, self.epoch, rank, number).permutation(
                len(positions)
            )
            whole = Window(numbers_at(self.rows, positions), order)
            # A window is released before the next one is planned.
            del positions, order
            if start > first:
                whole = whole.without_first(start - first)
            yield whole
            del whole


def _pieces(first_row: Rows, ends: Rows, start: int, stop: int) -> Rows:
    """Return the ascending positions of the part [start, stop) of the sequence of blocks."""
    low = int(np.searchsorted(ends, start, side="right"))
    high = int(np.searchsorted(ends, stop, side="left")) + 1
    begins = ends[low:high] - np.diff(ends[low:high], prepend=ends[low - 1] if low else 0)
    skipped = np.maximum(start - begins, 0)
    lengths = np.minimum(ends[low:high], stop) - begins - skipped
    firsts = first_row[low:high] + skipped
    by_row = np.argsort(firsts)
    firsts, lengths = firsts[by_row], lengths[by_row]
    return expanded(firsts, lengths)


def expanded(firsts: Rows, lengths: Rows) -> Rows:
    """Return the numbers of consecutive runs, given their first numbers and lengths."""
    offsets = np.cumsum(lengths) - lengths
    numbers = np.repeat(firsts - offsets, lengths)
    numbers += np.arange(len(numbers), dtype=np.int64)
    return numbers


def epoch_plan(
    rows: Rows | int,
    *,
    size: int,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    window_rows: int | None = None,
    block_rows: int | None = None,
    block_edges: Rows | None = None,
    permute: Callable[[], Rows] | None = None,
    first_row: int = 0,
) -> SamplingPlan:
    """Plan one epoch.

    Args:
        rows: ascending row numbers, or a count for 0..rows-1.
        size: number of ranks.
        batch_size: rows per rank and step.
        seed: with `epoch`, decides the order.
        epoch: counts from 0.
        shuffle: permute; False keeps file order.
        drop_last: drop the final global batch if it is not full.
        window_rows: memory bound in rows per rank, for data beyond it; None means that they fit in memory.
        block_rows: neighbouring rows that are read together; None means a 16th of the window.
        block_edges: edges of blocks, from 0 to the number of rows, instead of blocks of
            `block_rows`: for files best read in their own pieces.
        permute: returns `permutation(number of rows, seed, epoch)`; None computes it.
        first_row: rows of the order, over all ranks, to skip at the start; for data in memory.
    """
    if size < 1 or batch_size < 1:
        raise InvalidArgumentError(
            f"epoch_plan: size is {size} and batch_size {batch_size}; both must be at least 1."
        )
    num_rows = rows if isinstance(rows, int) else len(rows)
    if first_row and window_rows is not None:
        raise InvalidArgumentError(
            "Which rows meet in a batch depends on the number of ranks and the batch size, because the data exceed "
            "shuffle_bytes. Go on with those of before."
        )
    full_steps, rest = divmod(num_rows - first_row, size * batch_size)
    if rest == 1 and full_steps and size * batch_size > 1 and not drop_last:
        # BatchNorm cannot train on one row, so the previous step takes it too.
        full_steps, rest = full_steps - 1, size * batch_size + 1
    last = level(rest, size, batch_size) if rest and not drop_last else ()
    order: SampleOrder
    if not shuffle:
        order = _Interleaved(rows) if window_rows is None else _Shards(rows, window_rows)
    elif window_rows is None:
        order = _Uniform(rows, permute or functools.partial(permutation, num_rows, seed, epoch))
    else:
        block = block_rows if block_rows is not None else max(1, window_rows // 16)
        order = _Blocks(rows, seed, epoch, window_rows, max(1, block), block_edges)
    used = full_steps * size * batch_size + sum(last)
    return SamplingPlan(size, batch_size, used, full_steps, last, order, first_row)
