"""Plan the rows of each rank and step: pure functions of (rows, size, rank, batch size, seed, epoch).

Global batch `s` is the rows of all ranks at step `s`. Every global batch except the last holds size * batch_size
rows. The last batch is divided evenly among the ranks; it has one row more if that row would otherwise be a separate
step. If rows fit in memory, there are two orders:

- file order in memory (`shuffle=False`): global batch `s` is rows `[s * G, (s + 1) * G)` with
  `G = size * batch_size`, and each rank has one contiguous slice of it;
- uniform: the same slices of one permutation of all rows.

With these orders, N ranks with batch size b use the same rows at every step as one process with batch size N * b. Of
data beyond memory (`window_rows` given), each rank reads only its own contiguous part, about 1/N of the rows. So the
rows of a global batch depend on the number of ranks:

- file order beyond memory: rank `r` reads the `r`-th contiguous shard of the rows from front to back;
- blocks: blocks of neighbouring rows are in random order, rank `r` reads the `r`-th contiguous part of that
  sequence, and rows are permuted inside windows of `window_rows`.

If an epoch continues with another number of ranks or batch size, the rows that a `Stage` has not used are the sequence
of the next stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparkhvd.data.columns.ragged import Rows
from sparkhvd.errors import InvalidArgumentError

# Purpose numbers in the keys of random streams, so that two uses of one seed never share a stream.
_SPLIT, _ORDER, _WINDOW = 1, 2, 3


def random_stream(*key: int) -> np.random.Generator:
    """Make a random generator with equal numbers for equal keys on every machine."""
    return np.random.Generator(np.random.PCG64([k & (2**64 - 1) for k in key]))


def validation_count(num_rows: int, fraction: float) -> int:
    """Compute the number of validation rows for a fraction above 0.

    Of two rows or more, both sides get at least one row.
    """
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
    """Rows per rank of a final global batch of `num_rows` <= size * batch_size + 1.

    If possible, no rank gets exactly one row, because BatchNorm cannot train on one row: then fewer ranks share the
    rows, and one rank may get one row more than `batch_size`. With a batch size of 1 every rank gets at most one row.
    """
    ranks = size if batch_size == 1 or num_rows >= 2 * size else max(1, num_rows // 2)
    each, extra = divmod(num_rows, ranks)
    return tuple(each + (r < extra) if r < ranks else 0 for r in range(size))


def cuts(length: int, unit: int, last: int) -> list[tuple[int, int]]:
    """Cut `length` rows into ranges of `unit` rows, without a cut inside the `last` rows of the last step."""
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
        numbers = self.rows if self.order is None else self.order
        assert numbers is not None
        return len(numbers)

    def row_numbers(self) -> Rows:
        """Row numbers in the order of the batches."""
        if self.rows is None:
            assert self.order is not None
            return self.order
        return self.rows if self.order is None else self.rows[self.order]

    def without_first(self, count: int) -> Window:
        """Drop the first `count` rows of the order, so that they are not read."""
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
        self.check_step(step)
        return (self.batch_size,) * self.size if step < self.num_full_steps else self.last_counts

    def check_step(self, step: int) -> None:
        """Reject a step outside the epoch."""
        if not 0 <= step < self.num_steps:
            raise InvalidArgumentError(
                f"Step {step} does not exist: the epoch has {self.num_steps} steps."
            )

    def windows(self, rank: int, start_step: int = 0) -> Iterator[Window]:
        """Yield a rank's rows in order, as windows of whole batches (except at the end) within the memory bound.

        Rows of steps before `start_step` are neither planned nor read.
        """
        for window in self._order.windows(self, rank, self.rows_before(rank, start_step)):
            if window.num_rows:
                yield window
            del window

    def rows_before(self, rank: int, step: int) -> int:
        """Number of a rank's rows in the steps before `step`."""
        last = self.last_counts[rank] if step > self.num_full_steps else 0
        return min(step, self.num_full_steps) * self.batch_size + last

    def cuts(self, rank: int, start: int, length: int, unit: int) -> list[tuple[int, int]]:
        """Cut a rank's `length` rows after its first `start` rows into ranges of whole batches, about `unit` rows."""
        del start
        return cuts(length, unit, self.last_counts[rank] if self.last_counts else 0)


@dataclass(frozen=True)
class SampleOrder:
    """Base of the orders of rows."""

    rows: Rows | int

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        """Yield the rank's rows without its first `start` rows."""
        raise NotImplementedError


def numbers_at(rows: Rows | int, positions: Rows) -> Rows:
    """Convert positions in a selection to row numbers. A count selects all rows from 0."""
    return positions if isinstance(rows, int) else rows[positions]


def _sliced(plan: SamplingPlan, rank: int) -> Rows:
    """Positions of a rank's rows in the global sequence: the rank's slice of every global batch."""
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
    """Permute an epoch's in-memory rows over all ranks."""
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
    """Locate a rank's contiguous part of a sequence: first position, end, and rows in the last step."""
    last = plan.last_counts or (0,) * plan.size
    full = plan.num_full_steps * plan.batch_size
    begin = full * rank + sum(last[:rank])
    return begin, begin + full + last[rank], last[rank]


class _Sequence:
    """Sequence of the positions in a selection, independent of the ranks.

    Each rank reads a part of it.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def positions(self, start: int, stop: int) -> Rows:
        """Select the part [start, stop) of the sequence, as ascending positions."""
        return np.arange(start, stop, dtype=np.int64)


class _BlockSequence(_Sequence):
    """Sequence of blocks of neighbouring rows in random order."""

    def __init__(self, edges: Rows, stream: np.random.Generator) -> None:
        super().__init__(int(edges[-1]))
        blocks = stream.permutation(len(edges) - 1)
        self._first_row = edges[blocks]
        self._ends = np.cumsum(edges[blocks + 1] - self._first_row)

    def positions(self, start: int, stop: int) -> Rows:
        return _pieces(self._first_row, self._ends, start, stop)


class _RestSequence(_Sequence):
    """Sequence of the rows not used by a stage of an epoch.

    For each rank of the stage it has the rest of the rank's current window, then the rows after the window. The rest of
    a window is computed only when it is read, because most are read by one rank.
    """

    def __init__(self, parts: Sequence[tuple[int, Callable[[int, int], Rows]]]) -> None:
        self._ends = np.cumsum([0, *(length for length, _ in parts)])
        self._parts = [positions for _, positions in parts]
        super().__init__(int(self._ends[-1]))

    def positions(self, start: int, stop: int) -> Rows:
        low = int(np.searchsorted(self._ends, start, side="right")) - 1
        found = []
        while low < len(self._parts) and self._ends[low] < stop:
            begin, end = int(self._ends[low]), int(self._ends[low + 1])
            found.append(self._parts[low](max(start, begin) - begin, min(stop, end) - begin))
            low += 1
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)


@dataclass(frozen=True)
class _Windows(SampleOrder):
    """Order beyond memory: every rank reads one contiguous part of a sequence, window by window.

    Attributes:
        sequence: sequence of positions in `rows`.
        window_rows: bound on the rows of a window.
        key: part of the key of each window's random stream; None keeps the positions ascending.
    """

    sequence: _Sequence
    window_rows: int
    key: tuple[int, ...] | None

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        for number, first, stop in self._cuts(plan, rank):
            if stop <= start:
                continue
            if self.key is None:
                first = max(first, start)
                yield Window(numbers_at(self.rows, self._positions(plan, rank, first, stop)), None)
                continue
            positions = self._positions(plan, rank, first, stop)
            whole = Window(
                numbers_at(self.rows, positions), self._order(rank, number, stop - first)
            )
            # Drop the references, so that a window is released before the next window is planned.
            del positions
            if start > first:
                whole = whole.without_first(start - first)
            yield whole
            del whole

    def _cuts(self, plan: SamplingPlan, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, first row, end) of a rank's windows, counted from its part's start."""
        begin, end, last = _shard(plan, rank)
        # A window holds whole batches, so that no batch spans two windows.
        window = max(1, self.window_rows // plan.batch_size) * plan.batch_size
        for number, (first, stop) in enumerate(cuts(end - begin, window, last)):
            yield number, first, stop

    def _positions(self, plan: SamplingPlan, rank: int, first: int, stop: int) -> Rows:
        begin = _shard(plan, rank)[0]
        return self.sequence.positions(begin + first, begin + stop)

    def _order(self, rank: int, number: int, count: int) -> Rows:
        assert self.key is not None
        seed, epoch, *stage = self.key
        return random_stream(seed, _WINDOW, epoch, rank, number, *stage).permutation(count)

    def rest(self, plan: SamplingPlan, used: int) -> _Sequence:
        """Make the sequence without the first `used` rows over all ranks (whole steps)."""
        step = -(-used // (plan.size * plan.batch_size))
        parts: list[tuple[int, Callable[[int, int], Rows]]] = []

        def whole(start: int, stop: int) -> None:
            if start < stop:
                parts.append(
                    (stop - start, lambda a, b: self.sequence.positions(start + a, start + b))
                )

        for rank in range(plan.size):
            begin, end, _ = _shard(plan, rank)
            start = plan.rows_before(rank, step)
            if self.key is not None:
                for number, first, stop in self._cuts(plan, rank):
                    if first < start < stop:
                        left = functools.partial(self._left, plan, rank, number, first, stop, start)
                        parts.append((stop - start, left))
                        start = stop
            whole(begin + start, end)
        # Rows that `drop_last` has dropped from the stage's plan.
        whole(plan.num_rows, self.sequence.num_rows)
        return _RestSequence(parts)

    def _left(
        self,
        plan: SamplingPlan,
        rank: int,
        number: int,
        first: int,
        stop: int,
        start: int,
        a: int,
        b: int,
    ) -> Rows:
        """Select positions [a, b) of a window without its first `start - first` rows, ascending."""
        order = self._order(rank, number, stop - first)[start - first :]
        left: Rows = self._positions(plan, rank, first, stop)[np.sort(order)][a:b]
        return left


def _pieces(first_row: Rows, ends: Rows, start: int, stop: int) -> Rows:
    """Select the part [start, stop) of a sequence of blocks, as ascending positions."""
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
    """Expand runs of consecutive numbers, given by their first numbers and lengths."""
    offsets = np.cumsum(lengths) - lengths
    numbers = np.repeat(firsts - offsets, lengths)
    numbers += np.arange(len(numbers), dtype=np.int64)
    return numbers


@dataclass(frozen=True)
class Stage:
    """Part of an epoch with one number of ranks and one batch size.

    Attributes:
        size: number of ranks.
        batch_size: rows per rank and step.
        rows: rows that the stage has used, over all ranks.
    """

    size: int
    batch_size: int
    rows: int


def _steps(
    num_rows: int, size: int, batch_size: int, *, drop_last: bool
) -> tuple[int, tuple[int, ...]]:
    """Count the full steps, and the rows per rank of a partial last step (() without it)."""
    full, rest = divmod(num_rows, size * batch_size)
    if rest == 1 and full and size * batch_size > 1 and not drop_last:
        # BatchNorm cannot train on one row, so the previous step takes the single last row, too.
        full, rest = full - 1, size * batch_size + 1
    return full, level(rest, size, batch_size) if rest and not drop_last else ()


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
    before: Sequence[Stage] = (),
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
        block_edges: edges of blocks, from 0 to the number of rows, instead of blocks of `block_rows`; for files whose
            own pieces, such as row groups, are best read as a whole.
        permute: returns `permutation(number of rows, seed, epoch)`; None computes it.
        first_row: rows of the order, over all ranks, to skip at the start; for data in memory.
        before: alternative to `first_row` for any data: the earlier stages of the epoch, in order.
    """
    if size < 1 or batch_size < 1:
        raise InvalidArgumentError(
            f"epoch_plan: size is {size} and batch_size {batch_size}; both must be at least 1."
        )
    num_rows = rows if isinstance(rows, int) else len(rows)
    first_row = first_row or sum(stage.rows for stage in before)
    if window_rows is not None and (first_row if not before else not all(s.size for s in before)):
        raise InvalidArgumentError(
            "The data exceed shuffle_bytes, so the rows of a batch depend on the number of ranks and the batch size. Resume with "
            "the same number of ranks and batch size as before."
        )
    full_steps, last = _steps(num_rows - first_row, size, batch_size, drop_last=drop_last)
    order: SampleOrder
    if window_rows is not None:
        key: tuple[int, ...] | None = None
        sequence = _Sequence(num_rows)
        if shuffle:
            block = block_rows if block_rows is not None else max(1, window_rows // 16)
            if block_edges is None:
                starts = np.arange(0, num_rows, block, dtype=np.int64)
                block_edges = np.append(starts, num_rows)
            key, sequence = (
                (seed, epoch),
                _BlockSequence(block_edges, random_stream(seed, _ORDER, epoch)),
            )
        order, first_row = _Windows(rows, sequence, window_rows, key), 0
        for number, stage in enumerate(before, 1):
            full, part = _steps(
                order.sequence.num_rows, stage.size, stage.batch_size, drop_last=drop_last
            )
            used = full * stage.size * stage.batch_size + sum(part)
            plan = SamplingPlan(stage.size, stage.batch_size, used, full, part, order)
            key = None if key is None else (seed, epoch, number)
            order = _Windows(rows, order.rest(plan, stage.rows), window_rows, key)
    elif shuffle:
        order = _Uniform(rows, permute or functools.partial(permutation, num_rows, seed, epoch))
    else:
        order = _Interleaved(rows)
    used = full_steps * size * batch_size + sum(last)
    return SamplingPlan(size, batch_size, used, full_steps, last, order, first_row)
