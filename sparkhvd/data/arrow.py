"""Arrow columns, as Spark sends them, to numpy arrays of rows.

Values that cannot be used are counted, not raised: the pass over the data goes on, so that the user learns of all problems
at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data.arrow_memory import byte_rows, filled, flattened, is_list, numbers
from sparkhvd.data.columns.ragged import Ragged, SparseRows, Values
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.findings import Findings
from sparkhvd.data.narrowing import invalid_numbers, narrowed

__all__ = ["column_to_numpy", "usable_rows"]

Array = npt.NDArray[Any]


def column_to_numpy(
    array: pa.Array, column: Column, *, is_flag: bool = False
) -> tuple[Values | None, Findings]:
    """Convert one batch of a column to a C-contiguous array (rows, *shape) of `column.dtype`, or to rows of any length.

    Args:
        array: as `mapInArrow` gives it; a vector is a struct<type, size, indices, values>.
        column: as `check_schema` returned it.
        is_flag: store whether the value is above 0 (a validation column).

    Returns:
        The values (`SparseRows` of a sparse vector, `Ragged` of other columns whose rows differ), or None if some row
        cannot be used, and the counts of such rows.
    """
    findings = Findings()
    fill = column.invalid[1] if column.invalid[0] == "fill" else None
    if array.null_count:
        if fill is not None and column.kind == "scalar":
            array = filled(array, fill, column.dtype)
        else:
            findings.nulls = array.null_count
            array = array.drop_null()
    values: Values | None
    if column.kind in ("binary", "string"):
        values = byte_rows(array)
        return (values if findings.is_clean else None), findings
    if column.kind == "scalar":
        values = numbers(array)
    elif column.kind in ("vector", "sparse"):
        values = _vectors(array, column, findings)
    else:
        values = _lists(array, column, findings, fill)
    if values is None:
        return None, findings
    stored = narrowed(values, column, findings, is_flag=is_flag, fill=fill)
    return (stored if findings.is_clean else None), findings


def usable_rows(array: pa.Array, column: Column) -> Array | None:
    """Return a mask (rows,) of rows that are not null and hold neither null nor an invalid number; None means all."""
    bad = np.zeros(len(array), np.bool_)
    if array.null_count:
        bad |= numbers(array.is_null())
    if column.kind in ("binary", "string"):
        return ~bad if bad.any() else None
    row_of: Array | None = None
    elements = array.field("values") if pa.types.is_struct(array.type) else array
    while is_list(elements.type):
        # A null list is empty, as Spark's are.
        lengths, elements = flattened(elements)
        row_of = np.repeat(np.arange(len(lengths)) if row_of is None else row_of, lengths)
        if elements.null_count:
            bad[row_of[numbers(elements.is_null())]] = True
    values = numbers(elements)
    for invalid in invalid_numbers(values, column).values():
        if row_of is None:  # memory below a null holds anything, and its row is bad already
            bad |= invalid
        else:
            bad[row_of[invalid]] = True
    return ~bad if bad.any() else None


def _lists(
    array: pa.ListArray, column: Column, findings: Findings, fill: float | None
) -> Values | None:
    """Convert rows of arrays, also nested: one array if they have one shape, else (for ragged columns) rows."""
    lengths, elements = flattened(array)
    row_of = None
    has_all = True
    inner: list[int] = []
    while True:
        if elements.null_count:
            row_of = np.repeat(np.arange(len(lengths)), lengths) if row_of is None else row_of
            if fill is not None and not is_list(elements.type):
                elements = filled(elements, fill, column.dtype)
            else:
                findings.nulls += len(np.unique(row_of[numbers(elements.is_null())]))
                if not is_list(elements.type):
                    is_bool = pa.types.is_boolean(elements.type)
                    elements = filled(elements, False if is_bool else 0, column.dtype)
        if not is_list(elements.type):
            break
        row_of = np.repeat(np.arange(len(lengths)), lengths) if row_of is None else row_of
        is_there = ~numbers(elements.is_null()) if elements.null_count else slice(None)
        has_all = has_all and not elements.null_count
        below, elements = flattened(elements)
        widths, counts = np.unique(below[is_there], return_counts=True)
        if len(widths) > 1:
            usual = widths[counts.argmax()]
            odd = len(np.unique(row_of[below != usual]))
            findings.shapes[(*inner, -1)] += odd
            findings.shapes[(*inner, int(usual))] += len(lengths) - odd
            return None
        if len(widths):
            inner.append(int(widths[0]))
        row_of = np.repeat(row_of, below)
    if not has_all:
        return None
    values = numbers(elements)
    if column.kind == "ragged":
        if not lengths.any():  # rows without entries have entries of any shape
            inner = list(column.inner)
        width = int(np.prod(inner)) if inner else 1
        if inner:
            findings.shapes[tuple(inner)] += len(lengths)
        return Ragged.from_lengths(values, lengths.astype(np.int64) * width, tuple(inner))
    return _fixed_width(values, lengths, tuple(inner), findings)


def _fixed_width(
    values: Array, lengths: Array, inner: tuple[int, ...], findings: Findings
) -> Array | None:
    width = _one_width(lengths, findings, inner)
    if width is None or 0 in inner:
        return None
    return values.reshape(len(lengths), width, *inner)


def _one_width(widths: Array, findings: Findings, inner: tuple[int, ...] = ()) -> int | None:
    """Return the width that all rows have, above 0, or None; count the shapes (width, *inner)."""
    different, rows = np.unique(widths, return_counts=True)
    findings.shapes.update({(int(w), *inner): int(n) for w, n in zip(different, rows, strict=True)})
    return (int(different[0]) or None) if len(different) == 1 else None


def _vectors(array: pa.StructArray, column: Column, findings: Findings) -> Values | None:
    """Convert rows of Spark's vector struct: type 1 is dense (values only), type 0 sparse (size, indices, values)."""
    is_dense = numbers(array.field("type")) == 1
    lengths, elements = flattened(array.field("values"))
    sizes = lengths if is_dense.all() else np.where(is_dense, lengths, _sizes(array))
    width = _one_width(sizes, findings)
    if width is None:
        return None
    values = numbers(elements)
    if column.keeps_sparse(width):
        return _sparse_rows(array, values, lengths, is_dense, width)
    if is_dense.all():
        return values.reshape(len(sizes), width)
    out = np.zeros((len(sizes), width), np.float64)
    of_dense = np.repeat(is_dense, lengths)
    out[is_dense] = values[of_dense].reshape(-1, width)
    sparse_rows = np.repeat(np.arange(len(sizes)), np.where(is_dense, 0, lengths))
    out[sparse_rows, _indices(array)] = values[~of_dense]
    return out


def _sparse_rows(
    array: pa.StructArray, values: Array, lengths: Array, is_dense: Array, width: int
) -> SparseRows:
    """Keep vectors sparse; of dense ones the elements that are not zero.

    Args:
        array: of the vector struct.
        values: of all rows.
        lengths: values per row.
        is_dense: (rows,) bool.
        width: of every vector.
    """
    lengths = lengths.astype(np.int64)
    if not is_dense.any():
        indices = _indices(array)
    else:
        of_dense = np.repeat(is_dense, lengths)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.arange(len(values)) - begins).astype(np.int32)
        positions[~of_dense] = _indices(array)
        is_kept = ~of_dense | (values != 0)
        row_of = np.repeat(np.arange(len(lengths)), lengths)[is_kept]
        lengths = np.bincount(row_of, minlength=len(lengths)).astype(np.int64)
        indices, values = positions[is_kept], values[is_kept]
    return SparseRows(
        Ragged.from_lengths(indices, lengths), Ragged.from_lengths(values, lengths), width
    )


def _sizes(array: pa.StructArray) -> Array:
    return numbers(array.field("size"))


def _indices(array: pa.StructArray) -> Array:
    return numbers(flattened(array.field("indices"))[1])
