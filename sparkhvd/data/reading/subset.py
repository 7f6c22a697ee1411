"""Select the rows of a reader, and divide them among processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparkhvd.data.columns.ragged import Flags, Rows, Values
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.sampler import (
    SampleOrder,
    SamplingPlan,
    Window,
    expanded,
    numbers_at,
    random_stream,
    split_validation,
    validation_count,
)
from sparkhvd.data.reading.source import Source
from sparkhvd.errors import InvalidArgumentError

SUBSETS = ("all", "train", "validation")


def column_names(manifest: Manifest) -> list[str]:
    """List the columns for training: features, labels, sample weight and group."""
    split = manifest.schema.validation
    return [c.name for c in manifest.schema.columns if split is None or c.name != split.name]


def is_flagged(manifest: Manifest, subset: str) -> bool:
    """Whether the validation column decides the rows of the subset. Never for "all"."""
    return subset != "all" and manifest.schema.validation is not None


@dataclass(frozen=True)
class RowDivision:
    """Division of rows into contiguous parts, one per process, equal in all processes.

    Attributes:
        edges: row numbers at which the source's pieces begin, and at which parts are cut; None cuts anywhere.
    """

    edges: Rows | None = None

    def part(self, rows: Rows | int, number: int, count: int) -> Rows | int:
        """Ascending row numbers of part `number` of `count`. A single part has all rows."""
        if count == 1:
            return rows
        low, high = (self._cut(rows, n, count) for n in (number, number + 1))
        return np.arange(low, high, dtype=np.int64) if isinstance(rows, int) else rows[low:high]

    def _cut(self, rows: Rows | int, number: int, count: int) -> int:
        """Find the first position of a part in a selection."""
        cut = count_of(rows) * number // count
        if self.edges is None:
            return cut
        return _nearest(
            self.edges if isinstance(rows, int) else np.searchsorted(rows, self.edges), cut
        )


def _nearest(edges: Rows, wanted: int) -> int:
    return int(edges[np.argmin(np.abs(edges - wanted))])


def read_flags(
    source: Source, manifest: Manifest, usable: Rows | None = None, part: tuple[int, int] = (0, 1)
) -> Flags:
    """Read the validation flags of the usable rows, or of a part of them.

    Args:
        source: of the manifest's files.
        manifest: with a validation column.
        usable: ascending numbers of the usable rows; None means all.
        part: (number, count) of the part.
    """
    column = manifest.schema.validation
    assert column is not None
    rows = manifest.num_rows if usable is None else usable
    values = read_rows(source, [column.name], rows, part, RowDivision(source.block_edges))
    flags: Flags = np.asarray(values[column.name]) != 0
    return flags


def read_groups(source: Source, manifest: Manifest, part: tuple[int, int] = (0, 1)) -> Rows:
    """Read the group number of every row, or of a part of the rows."""
    column = manifest.schema.group
    assert column is not None
    division = RowDivision(source.block_edges)
    return np.asarray(
        read_rows(source, [column.name], manifest.num_rows, part, division)[column.name]
    )


def flagged(flags: Flags, subset: str) -> Rows:
    """Find the ascending positions of the rows in "train" or "validation"."""
    return np.flatnonzero(flags if subset == "validation" else ~flags)


def select_rows(
    source: Source,
    manifest: Manifest,
    subset: str,
    *,
    validation: float | None,
    seed: int,
    usable: Rows | None = None,
    flags: Flags | None = None,
    groups: Rows | None = None,
) -> Rows | int:
    """Select the rows of a subset: ascending row numbers, or a count if it has all rows from 0.

    Args:
        source: of the manifest's files; read only if a column marks the validation rows and `flags` is None.
        manifest: of the data.
        subset: "all", "train" or "validation".
        validation: the validation fraction; None if the manifest has a validation column (or there is no validation).
        seed: decides the split.
        usable: ascending numbers of the usable rows; None means all.
        flags: the validation flags of the usable rows, if already read.
        groups: the group number of each row; a fraction then selects whole groups.

    Raises:
        InvalidArgumentError: the data have no validation rows.
    """
    total: Rows | int = manifest.num_rows if usable is None else usable
    if subset == "all":
        return total
    if is_flagged(manifest, subset):
        if flags is None:
            flags = read_flags(source, manifest, usable)
        chosen = flagged(flags, subset)
        return chosen if usable is None else usable[chosen]
    if not validation:
        if subset == "train":
            return total
        raise InvalidArgumentError(
            "Reader(subset='validation'): the data have no validation column, and no fraction is given. Give "
            "validation=0.1, or read subset='all'."
        )
    if groups is None:
        train, held_out = split_validation(count_of(total), validation, seed)
    else:
        train, held_out = split_groups(groups, validation, seed)
    chosen = train if subset == "train" else held_out
    return chosen if usable is None else usable[chosen]


def fits_in_memory(rows: Rows | int, row_bytes: int, limit_bytes: int) -> bool:
    return count_of(rows) * row_bytes <= limit_bytes


def count_of(rows: Rows | int) -> int:
    return rows if isinstance(rows, int) else len(rows)


def read_rows(
    source: Source,
    names: Sequence[str],
    rows: Rows | int,
    part: tuple[int, int],
    division: RowDivision,
) -> dict[str, Values]:
    """Read columns of a part of the rows with `Source.read`."""
    numbers = division.part(rows, *part)
    return source.read(names, None if isinstance(numbers, int) else numbers)


# ----------------------------------------------------------------------------------------------------
# Plan epochs of whole groups: rows with an equal value of a column stay together, on one rank.
# Groups are permuted, not rows. The sequence of groups is divided among ranks at group ends, as near as possible to
# equal numbers of rows, and each rank's part is divided into batches in the same way. So every epoch and every rank has
# equally many steps, and a batch has about `batch_size` rows, up to half a group more or less at either end. A group of
# more than `batch_size` rows is cut into equal pieces, which stay neighbours on their rank.

# Purpose numbers of random streams, different from the numbers in `sampler`.
_SPLIT, _ORDER = 11, 12


def group_edges(numbers: Rows, rows: Rows | int) -> Rows:
    """Find the first position of each group in a selection, followed by the number of rows.

    Args:
        numbers: group number of each row; equal neighbours are one group.
        rows: ascending numbers of the selected rows, or a count for all.
    """
    chosen = numbers if isinstance(rows, int) else numbers[rows]
    begins = np.append(0, np.flatnonzero(np.diff(chosen)) + 1)
    return np.append(begins, len(chosen)) if len(chosen) else begins


def split_groups(numbers: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split row numbers into (train, validation), each ascending, by whole groups in seeded order.

    Raises:
        InvalidArgumentError: there are too few groups for both sides.
    """
    edges = group_edges(numbers, len(numbers))
    lengths = np.diff(edges)
    if len(lengths) < 2:
        raise InvalidArgumentError(
            f"validation={fraction}: the data have {len(lengths)} group of group_col, and a group is not split. Give data with more "
            "groups, or a column or DataFrame of validation rows."
        )
    order = random_stream(seed, _SPLIT).permutation(len(lengths))
    ends = np.cumsum(lengths[order])
    wanted = validation_count(len(numbers), fraction)
    count = int(np.clip(np.argmin(np.abs(ends - wanted)) + 1, 1, len(lengths) - 1))
    is_held_out = np.zeros(len(lengths), np.bool_)
    is_held_out[order[:count]] = True
    of_rows = np.repeat(is_held_out, lengths)
    return np.flatnonzero(~of_rows), np.flatnonzero(of_rows)


class GroupPlan(SamplingPlan):
    """Plan of an epoch of groups, with batches of different lengths."""

    _order: _Groups

    def rows_per_rank(self, step: int) -> tuple[int, ...]:
        self.check_step(step)
        edges = self._order.batch_edges
        return tuple((edges[:, step + 1] - edges[:, step]).tolist())

    def rows_before(self, rank: int, step: int) -> int:
        edges = self._order.batch_edges[rank]
        return int(edges[step] - edges[0])

    def cuts(self, rank: int, start: int, length: int, unit: int) -> list[tuple[int, int]]:
        """Cut a rank's `length` rows after its first `start` rows into ranges of whole batches and >= `unit` rows."""
        edges = self._order.batch_edges[rank] - self._order.batch_edges[rank, 0] - start
        found = [0]
        for edge in edges[(edges > 0) & (edges < length)].tolist():
            if edge - found[-1] >= unit:
                found.append(edge)
        return list(zip(found, [*found[1:], length], strict=True))


@dataclass(frozen=True)
class _Groups(SampleOrder):
    """Order of groups.

    Attributes:
        edges: positions at which groups begin, from 0 to the number of rows.
        size: number of ranks.
        batch_size: approximate number of rows per rank and step.
        num_steps: steps of the epoch.
        seed, epoch, shuffle: as passed to `epoch_plan`.
        window_rows: memory bound in rows per rank; None means that they fit in memory.
        block_rows: neighbouring rows that are read together.
    """

    edges: Rows
    size: int
    batch_size: int
    num_steps: int
    seed: int
    epoch: int
    shuffle: bool
    window_rows: int | None
    block_rows: int

    @functools.cached_property
    def _sequence(self) -> Rows:
        """Group numbers in the order of the epoch."""
        count = len(self.edges) - 1
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        random = random_stream(self.seed, _ORDER, self.epoch)
        if self.window_rows is None:
            return random.permutation(count)
        # Shuffle blocks of neighbouring groups, which are read together; then shuffle groups inside windows.
        begins = np.flatnonzero(np.diff(self.edges[:-1] // self.block_rows, prepend=-1))
        lengths = np.diff(begins, append=count)
        blocks = random.permutation(len(begins))
        sequence = expanded(begins[blocks], lengths[blocks])
        window = (np.cumsum(np.diff(self.edges)[sequence]) - 1) // self.window_rows
        return sequence[np.lexsort((random.random(count), window))]

    @functools.cached_property
    def _begins(self) -> Rows:
        """Position in the selection of the first row of each group, in the order of the epoch."""
        return self.edges[self._sequence]

    @functools.cached_property
    def _lengths(self) -> Rows:
        return np.diff(self.edges)[self._sequence]

    @functools.cached_property
    def _ends(self) -> Rows:
        """Position of each group's end in the epoch's order."""
        return np.cumsum(self._lengths)

    @functools.cached_property
    def batch_edges(self) -> Rows:
        """Edges of each rank's batches in the epoch's order, as positions (ranks, steps + 1)."""
        total = int(self.edges[-1])
        ends = np.append(0, self._ends)
        ranks = _nearest_groups(ends, np.linspace(0, total, self.size + 1))
        num_pieces = -(-self._lengths // self.batch_size)
        number = expanded(np.ones(len(num_pieces), np.int64), num_pieces)
        lengths, parts = (np.repeat(values, num_pieces) for values in (self._lengths, num_pieces))
        pieces = np.append(0, np.repeat(ends[:-1], num_pieces) + lengths * number // parts)
        edges = np.empty((self.size, self.num_steps + 1), np.int64)
        for rank, (begin, end) in enumerate(zip(ranks[:-1], ranks[1:], strict=True)):
            low, high = np.searchsorted(pieces, (begin, end))
            wanted = np.linspace(begin, end, self.num_steps + 1)
            edges[rank] = _nearest_groups(pieces[low : high + 1], wanted)
        return edges

    def windows(self, plan: SamplingPlan, rank: int, start: int) -> Iterator[Window]:
        """Yield the rank's rows without its first `start` rows, in windows of whole batches."""
        edges = self.batch_edges[rank]
        first, end = int(edges[0]) + start, int(edges[-1])
        limit = self.window_rows or end - first
        while first < end:
            stop = int(edges[np.searchsorted(edges, first + limit, side="right") - 1])
            if stop <= first:
                stop = int(edges[np.searchsorted(edges, first, side="right")])
            positions = self._positions(first, stop)
            if self.window_rows is None:
                yield Window(None, numbers_at(self.rows, positions))
            else:
                read = np.sort(positions)
                yield Window(numbers_at(self.rows, read), np.searchsorted(read, positions))
            first = stop

    def _positions(self, first: int, stop: int) -> Rows:
        """Convert the rows [first, stop) of the epoch's order to positions in the selection."""
        low = int(np.searchsorted(self._ends, first, side="right"))
        high = int(np.searchsorted(self._ends, stop, side="left")) + 1
        begins, lengths = self._begins[low:high].copy(), self._lengths[low:high].copy()
        skipped = first - (int(self._ends[low]) - int(lengths[0]))
        lengths[-1] -= self._ends[high - 1] - stop
        begins[0] += skipped
        lengths[0] -= skipped
        return expanded(begins, lengths)


def _nearest_groups(edges: Rows, wanted: npt.NDArray[np.float64]) -> Rows:
    """Find the nearest of the ascending edges for each wanted position."""
    above = np.clip(np.searchsorted(edges, wanted), 0, len(edges) - 1)
    below = np.maximum(above - 1, 0)
    return np.where(wanted - edges[below] <= edges[above] - wanted, edges[below], edges[above])


def group_plan(
    rows: Rows | int,
    edges: Rows,
    *,
    size: int,
    batch_size: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    window_rows: int | None,
    block_rows: int,
) -> GroupPlan:
    """Plan one epoch of groups, with the arguments of `epoch_plan` and edges from `group_edges`."""
    total = int(edges[-1])
    per_rank = -(-total // size)
    longest = int(np.diff(edges).max(initial=0))
    if longest > batch_size and size > 1:
        per_rank += longest  # plan extra steps, so that no batch exceeds batch_size
    num_steps = -(-per_rank // batch_size)
    order = _Groups(
        rows,
        edges,
        size,
        batch_size,
        num_steps,
        seed,
        epoch,
        shuffle,
        window_rows,
        block_rows,
    )
    return GroupPlan(size, batch_size, total, num_steps, (), order)
