"""Select the rows of a reader, and divide them among processes that read a part each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparkhvd.data.columns.ragged import Flags, Rows, Values
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.groups import split_groups
from sparkhvd.data.reading.sampler import split_validation
from sparkhvd.data.reading.source import Source
from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "SUBSETS",
    "Division",
    "column_names",
    "count_of",
    "fits_in_memory",
    "flagged",
    "is_flagged",
    "read_flags",
    "read_groups",
    "read_rows",
    "select_rows",
]

SUBSETS = ("all", "train", "validation")


def column_names(manifest: Manifest) -> list[str]:
    """Return the columns that training reads of every row: features, labels, sample weight and group."""
    split = manifest.schema.validation
    return [c.name for c in manifest.schema.columns if split is None or c.name != split.name]


def is_flagged(manifest: Manifest, subset: str) -> bool:
    """Return True if a column tells the rows of the subset."""
    return subset != "all" and manifest.schema.validation is not None


@dataclass(frozen=True)
class Division:
    """Division of rows into contiguous parts, for processes that read one each; equal on all of them.

    Attributes:
        edges: row numbers where the source's pieces begin, at which parts are cut; None cuts anywhere.
    """

    edges: Rows | None = None

    def part(self, rows: Rows | int, number: int, count: int) -> Rows | int:
        """Return the ascending row numbers of part `number` of `count`; all rows if there is one part."""
        if count == 1:
            return rows
        low, high = (self._cut(rows, n, count) for n in (number, number + 1))
        return np.arange(low, high, dtype=np.int64) if isinstance(rows, int) else rows[low:high]

    def _cut(self, rows: Rows | int, number: int, count: int) -> int:
        """Return the position in a selection where a part begins."""
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
        usable: ascending numbers of the rows that count; None means all.
        part: (number, count) of the part.
    """
    column = manifest.schema.validation
    assert column is not None
    rows = manifest.num_rows if usable is None else usable
    values = read_rows(source, [column.name], rows, part, Division(source.block_edges))
    flags: Flags = np.asarray(values[column.name]) != 0
    return flags


def read_groups(source: Source, manifest: Manifest, part: tuple[int, int] = (0, 1)) -> Rows:
    """Read the number of the group of every row, or of a part of the rows."""
    column = manifest.schema.group
    assert column is not None
    division = Division(source.block_edges)
    return np.asarray(
        read_rows(source, [column.name], manifest.num_rows, part, division)[column.name]
    )


def flagged(flags: Flags, subset: str) -> Rows:
    """Return the ascending positions of the subset's rows."""
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
    """Return the ascending numbers of the rows of a subset, or a count for all from 0 on.

    Args:
        source: of the manifest's files; read only if a column tells the validation rows and `flags` is None.
        manifest: of the data.
        subset: "all", "train" or "validation".
        validation: the validation fraction; None if the manifest has a validation column (or there is none).
        seed: decides the split.
        usable: ascending numbers of the rows that count; None means all.
        flags: the validation flags of the usable rows, if they have been read.
        groups: the number of the group of each row; a fraction takes whole groups then.

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
            "Reader(subset='validation'): the data have no validation column and no fraction was given. Give "
            "validation=0.1, or read subset='all'."
        )
    if groups is None:
        train, held_out = split_validation(count_of(total), validation, seed)
    else:
        train, held_out = split_groups(groups, validation, seed)
    chosen = train if subset == "train" else held_out
    return chosen if usable is None else usable[chosen]


def fits_in_memory(rows: Rows | int, row_bytes: int, limit_bytes: int) -> bool:
    """Return True if rows of `row_bytes` bytes are held in memory under this limit."""
    return count_of(rows) * row_bytes <= limit_bytes


def count_of(rows: Rows | int) -> int:
    """Return the number of rows of a selection."""
    return rows if isinstance(rows, int) else len(rows)


def read_rows(
    source: Source,
    names: Sequence[str],
    rows: Rows | int,
    part: tuple[int, int],
    division: Division,
) -> dict[str, Values]:
    """Read columns of a part of the rows, as `Source.read` gives them."""
    numbers = division.part(rows, *part)
    return source.read(names, None if isinstance(numbers, int) else numbers)
