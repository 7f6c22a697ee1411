"""Batches of a rank, and the arrays that they are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkhvd.data.columns.ragged import Array, Ragged, SparseRows, Values
from sparkhvd.data.columns.schema import Column

__all__ = ["Batch", "no_rows", "packed", "pinned", "row_bytes"]


@dataclass(frozen=True)
class Batch:
    """The rows of one rank at one step.

    Attributes:
        columns: by name, arrays of shape (rows, *shape of the column); writable, not shared with other batches. Of sparse
            vectors `SparseRows`; of a column with a collate function its result.
        num_rows: rows of this rank, possibly 0.
        rows_per_rank: rows of every rank at this step, known without communication.
        step: counts from 0 in each epoch.
        num_broken: rows of this rank that a decoder has left out; `rows_per_rank` counts them.
    """

    columns: dict[str, Any]
    num_rows: int
    rows_per_rank: tuple[int, ...]
    step: int
    num_broken: int = 0


def no_rows(column: Column) -> Values:
    """Return zero rows of a column."""
    if column.kind == "sparse":
        return SparseRows.empty(column.dtype, column.num_elements)
    return np.empty((0, *(column.row_shape or ())), column.row_dtype)


def row_bytes(column: Column) -> int:
    """Return the bytes of a row of a batch; 0 if only its stored form tells."""
    if column.is_fixed or not column.row_shape:
        return column.row_bytes if column.is_fixed else 0
    if column.kind == "sparse" or -1 in column.row_shape:
        return 0
    return math.prod(column.row_shape) * column.row_dtype.itemsize


def pinned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an array in page-locked memory; torch keeps freed memory for the next."""
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return flat.view(dtype).reshape(shape)


def packed(values: Values) -> Values:
    """Return the rows in memory of their own, if they refer to shared values."""
    return values.packed() if isinstance(values, (Ragged, SparseRows)) else values
