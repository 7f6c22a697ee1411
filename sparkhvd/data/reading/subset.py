"""Which rows of the data a reader has, and whether they fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkhvd.data.columns.ragged import Rows
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.reading.sampler import split_validation
from sparkhvd.data.reading.source import Source
from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "SUBSETS",
    "column_names",
    "count_of",
    "fits_in_memory",
    "part_of",
    "read_rows",
    "same_rows",
    "select_rows",
]

SUBSETS = ("all", "train", "validation")


def column_names(manifest: Manifest) -> list[str]:
    """Features, labels and sample weight: what training reads of every row."""
    split = manifest.schema.validation
    return [c.name for c in manifest.schema.columns if split is None or c.name != split.name]


def select_rows(
    source: Source,
    manifest: Manifest,
    subset: str,
    *,
    validation: float | None,
    seed: int,
    usable: Rows | None = None,
) -> Rows | int:
    """Ascending numbers of the rows of a subset, or a count for all from 0 on.

    Args:
        source: of the manifest's files; read only if a column tells the validation rows.
        manifest: which files there are.
        subset: "all", "train" or "validation".
        validation: the validation fraction; None if the manifest has a validation column (or there is none).
        seed: decides the split.
        usable: ascending numbers of the rows that count; None means all.

    Raises:
        InvalidArgumentError: the subset cannot be told apart.
    """
    total: Rows | int = manifest.num_rows if usable is None else usable
    if subset == "all":
        return total
    column = manifest.schema.validation
    if column is not None:
        flags = source.read([column.name], usable)[column.name] != 0
        chosen = np.flatnonzero(flags if subset == "validation" else ~flags)
        return chosen if usable is None else usable[chosen]
    if not validation:
        if subset == "train":
            return total
        raise InvalidArgumentError(
            "Reader(subset='validation'): the data have no validation column and no fraction was given. Give "
            "validation=0.1, or read subset='all'."
        )
    count = total if isinstance(total, int) else len(total)
    train, held_out = split_validation(count, validation, seed)
    chosen = train if subset == "train" else held_out
    return chosen if usable is None else usable[chosen]


def fits_in_memory(rows: Rows | int, row_bytes: int, limit_bytes: int) -> bool:
    """Whether rows of `row_bytes` bytes are held in memory under this limit."""
    return count_of(rows) * row_bytes <= limit_bytes


def count_of(rows: Rows | int) -> int:
    """How many rows there are."""
    return rows if isinstance(rows, int) else len(rows)


def read_rows(
    source: Source, names: Sequence[str], rows: Rows | int, part: tuple[int, int] = (0, 1)
) -> dict[str, Any]:
    """The arrays of these columns and rows, or of a part of the rows, as `Source.read` gives them."""
    numbers = None if isinstance(rows, int) else rows
    return source.read(names, numbers if part == (0, 1) else part_of(source, rows, *part))


def part_of(source: Source, rows: Rows | int, number: int, count: int) -> Rows:
    """Ascending row numbers of one of `count` parts of a selection; cut where the source's pieces begin, if it has some."""
    total = count_of(rows)
    edges = source.block_edges
    cuts = []
    for wanted in (total * number // count, total * (number + 1) // count):
        if edges is not None:
            places = edges if isinstance(rows, int) else np.searchsorted(rows, edges)
            wanted = int(places[np.argmin(np.abs(places - wanted))])
        cuts.append(wanted)
    chosen = np.arange(*cuts, dtype=np.int64)
    return chosen if isinstance(rows, int) else rows[cuts[0] : cuts[1]]


def same_rows(a: Any, b: Any) -> bool:
    """Whether two selections are of the same rows."""
    if isinstance(a, int) or isinstance(b, int):
        return bool(isinstance(a, int) and isinstance(b, int) and a == b)
    return bool(np.array_equal(a, b))
