"""Rows of variable length in memory: their values in one array, and the position of each row in it.

Selecting and slicing rows copies no values; only the rows of a batch are gathered, without Python code per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Row numbers of a data set.
Rows = npt.NDArray[np.int64]
# One flag per row.
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, stored in one array.

    Attributes:
        values: (n,) elements of all rows, with or without gaps between rows.
        starts: (rows,) int64, start of each row in `values`.
        lengths: (rows,) int64, elements of each row.
        inner: shape of one entry of a row; `()` for flat rows.
    """

    values: Array
    starts: Array
    lengths: Array
    inner: tuple[int, ...] = ()

    @classmethod
    def from_lengths(cls, values: Array, lengths: Array, inner: tuple[int, ...] = ()) -> Ragged:
        """Divide `values` into consecutive rows."""
        return cls(values, np.cumsum(lengths) - lengths, lengths, inner)

    @classmethod
    def empty(cls, dtype: npt.DTypeLike, num_rows: int = 0, inner: tuple[int, ...] = ()) -> Ragged:
        """Make rows without elements."""
        zeros = np.zeros(num_rows, np.int64)
        return cls(np.empty(0, dtype), zeros, zeros, inner)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: slice) -> Ragged:
        return Ragged(self.values, self.starts[rows], self.lengths[rows], self.inner)

    def take(self, rows: Array) -> Ragged:
        """Select rows by number, in this order. The values are shared."""
        return Ragged(self.values, self.starts[rows], self.lengths[rows], self.inner)

    def row(self, number: int) -> Array:
        """View one row as (entries, *inner)."""
        start = self.starts[number]
        flat = self.values[start : start + self.lengths[number]]
        return flat.reshape(-1, *self.inner) if self.inner else flat

    def gathered(self) -> Array:
        """Gather the elements (n,) row by row, without gaps."""
        total = int(self.lengths.sum())
        if not total:
            return self.values[:0]
        if (self.starts[1:] == self.starts[:-1] + self.lengths[:-1]).all():
            return self.values[self.starts[0] :][:total]
        return np.take(self.values, self.positions(), mode="clip")

    def packed(self) -> Ragged:
        """Copy the rows consecutively to new memory."""
        return Ragged.from_lengths(self.gathered().copy(), self.lengths, self.inner)

    def positions(self) -> Array:
        """Positions (n,) of the elements in `values`, row by row."""
        ahead = np.cumsum(self.lengths) - self.lengths
        return np.repeat(self.starts - ahead, self.lengths) + np.arange(int(self.lengths.sum()))

    def padded(self, value: float, length: int | None = None) -> Array:
        """Make an array (rows, length, *inner): pad short rows with `value`, and cut long rows.

        Args:
            value: fills short rows.
            length: None means the length of the longest row.
        """
        width = math.prod(self.inner)
        longest = int(self.lengths.max()) // max(width, 1) if len(self) else 0
        out_length = longest if length is None else length
        out = np.full((len(self), out_length * width), value, self.values.dtype)
        kept = np.minimum(self.lengths, out.shape[1])
        cut = Ragged(self.values, self.starts, kept)
        out[np.arange(out.shape[1]) < kept[:, None]] = cut.gathered()
        return out.reshape(len(self), out_length, *self.inner)


@dataclass(frozen=True)
class SparseRows:
    """Rows of a sparse matrix, stored as ascending column numbers and values of the nonzero entries.

    Attributes:
        indices: int32 column number of each nonzero entry.
        values: value of each nonzero entry.
        width: number of columns of the matrix.
    """

    indices: Ragged
    values: Ragged
    width: int

    @classmethod
    def empty(cls, dtype: npt.DTypeLike, width: int, num_rows: int = 0) -> SparseRows:
        """Make rows of zeros."""
        return cls(Ragged.empty(np.int32, num_rows), Ragged.empty(dtype, num_rows), width)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> SparseRows:
        return SparseRows(self.indices[rows], self.values[rows], self.width)

    def take(self, rows: Array) -> SparseRows:
        """Select rows by number, in this order."""
        return SparseRows(self.indices.take(rows), self.values.take(rows), self.width)

    def packed(self) -> SparseRows:
        """Copy the rows consecutively to new memory."""
        return SparseRows(self.indices.packed(), self.values.packed(), self.width)

    def coordinates(self) -> Array:
        """Row and column of each value as (2, n) int64, in the order of `values.gathered()`."""
        lengths = self.values.lengths
        out = np.empty((2, int(lengths.sum())), np.int64)
        out[0] = np.repeat(np.arange(len(lengths)), lengths)
        out[1] = self.indices.gathered()
        return out

    def dense(self) -> Array:
        """Convert to a dense matrix (rows, width), for tests and interactive code only."""
        out = np.zeros((len(self), self.width), self.values.values.dtype)
        rows, columns = self.coordinates()
        out[rows, columns] = self.values.gathered()
        return out


Values = Array | Ragged | SparseRows


def take(values: Values, rows: Array, empty: Callable[..., Array] = np.empty) -> Values:
    """Select rows by number, in this order. An array is allocated by `empty(shape, dtype)`."""
    if isinstance(values, np.ndarray):
        out = empty((len(rows), *values.shape[1:]), values.dtype)
        # Row numbers come from a permutation and are in range. mode="clip" avoids numpy's range check and buffer.
        return np.take(values, rows, axis=0, mode="clip", out=out)
    return values.take(rows)


def joined(parts: Sequence[Ragged | SparseRows], empty: Ragged | SparseRows) -> Ragged | SparseRows:
    """Join packed parts of the same class as `empty` and return `empty` if there are no parts."""
    if not parts:
        return empty
    if len(parts) == 1:
        return parts[0]
    if isinstance(empty, SparseRows):
        sparse = [p for p in parts if isinstance(p, SparseRows)]
        return SparseRows(
            _joined([p.indices for p in sparse], ()),
            _joined([p.values for p in sparse], ()),
            empty.width,
        )
    return _joined([p for p in parts if isinstance(p, Ragged)], empty.inner)


def _joined(parts: Sequence[Ragged], inner: tuple[int, ...]) -> Ragged:
    return Ragged.from_lengths(
        np.concatenate([p.values for p in parts]),
        np.concatenate([p.lengths for p in parts]),
        inner,
    )


def row_shape(values: Values) -> tuple[int, ...]:
    """Shape of a row, starting with -1 if rows differ."""
    if isinstance(values, SparseRows):
        return (values.width,)
    if isinstance(values, Ragged):
        return (-1, *values.inner)
    return tuple(values.shape[1:])


def num_bytes(values: Values) -> int:
    """Count the bytes of the stored elements."""
    if isinstance(values, np.ndarray):
        return values.nbytes
    if isinstance(values, SparseRows):
        return num_bytes(values.indices) + num_bytes(values.values)
    return int(values.lengths.sum()) * values.values.itemsize


def value_range(values: Values) -> tuple[int, int] | None:
    """Find the smallest and largest integer of rows without gaps, or None if sparse or empty."""
    flat = values if isinstance(values, np.ndarray) else values.values
    return (
        (int(flat.min()), int(flat.max())) if isinstance(flat, np.ndarray) and flat.size else None
    )


def keep_mask(size: int, starts: Array, ends: Array) -> Array:
    """Mask (size,), true from each start to its end. The ranges must not overlap."""
    change = np.zeros(size + 1, np.int8)
    change[starts] += 1
    change[ends] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)
