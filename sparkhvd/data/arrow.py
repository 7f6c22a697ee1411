"""Convert Spark's Arrow columns to numpy arrays of rows.

An unusable value is counted and raises no error: the pass over the data continues, so that one error lists everything.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data.arrow_types import (
    byte_rows,
    filled,
    flattened,
    holds,
    is_list,
    numbers,
    numpy_to_array,
)
from sparkhvd.data.columns.ragged import Ragged, SparseRows, Values
from sparkhvd.data.columns.schema import Column

Array = npt.NDArray[Any]


def column_to_numpy(
    array: pa.Array, column: Column, *, is_flag: bool = False
) -> tuple[Values | None, InvalidRowCounts]:
    """Convert one batch of a column to a C-contiguous array (rows, *shape) of `column.dtype`, or to rows of any length.

    Args:
        array: from `mapInArrow`; a vector is a struct<type, size, indices, values>.
        column: as `check_schema` returned it.
        is_flag: True for the validation column: store whether the value is above 0.

    Returns:
        The values (`SparseRows` of a sparse vector, `Ragged` of other columns whose rows differ), or None if a row
        cannot be used, and the counts of such rows.
    """
    invalid_rows = InvalidRowCounts()
    fill = fill_of(column)
    if array.null_count:
        if fill is not None and column.kind == "scalar":
            array = filled(array, fill, column.dtype)
        else:
            invalid_rows.nulls = array.null_count
            array = array.drop_null()
    values: Values | None
    if column.kind in ("binary", "string"):
        values = byte_rows(array)
        return (values if invalid_rows.is_clean else None), invalid_rows
    if column.kind == "scalar":
        values = numbers(array)
    elif column.kind in ("vector", "sparse"):
        values = _vectors(array, column, invalid_rows)
    else:
        values = _lists(array, column, invalid_rows, fill)
    if values is None:
        return None, invalid_rows
    stored = narrowed(values, column, invalid_rows, is_flag=is_flag)
    return (stored if invalid_rows.is_clean else None), invalid_rows


def fill_of(column: Column) -> float | None:
    """Choose the fill value for nulls (NaN under "keep"), or None if a null is invalid."""
    if column.invalid[0] == "keep":
        return math.nan
    return column.invalid[1] if column.invalid[0] == "fill" else None


def usable_rows(array: pa.Array, column: Column) -> Array | None:
    """Make the mask (rows,) of rows without nulls or invalid numbers, or None if all are usable."""
    bad = np.zeros(len(array), np.bool_)
    if array.null_count:
        bad |= numbers(array.is_null())
    if column.kind in ("binary", "string"):
        return ~bad if bad.any() else None
    row_of: Array | None = None
    elements = array.field("values") if pa.types.is_struct(array.type) else array
    while is_list(elements.type):
        # Spark's arrays store a null list as an empty list.
        lengths, elements = flattened(elements)
        row_of = np.repeat(np.arange(len(lengths)) if row_of is None else row_of, lengths)
        if elements.null_count:
            bad[row_of[numbers(elements.is_null())]] = True
    values = numbers(elements)
    for invalid in invalid_numbers(values, column).values():
        # The number stored for a null is undefined, but its row is marked already.
        if row_of is None:
            bad |= invalid
        else:
            bad[row_of[invalid]] = True
    return ~bad if bad.any() else None


def _lists(
    array: pa.ListArray, column: Column, invalid_rows: InvalidRowCounts, fill: float | None
) -> Values | None:
    """Convert lists, also nested, to one array if rows have one shape, or to `Ragged` rows for a ragged column."""
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
                invalid_rows.nulls += len(np.unique(row_of[numbers(elements.is_null())]))
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
            invalid_rows.shapes[(*inner, -1)] += odd
            invalid_rows.shapes[(*inner, int(usual))] += len(lengths) - odd
            return None
        if len(widths):
            inner.append(int(widths[0]))
        row_of = np.repeat(row_of, below)
    if not has_all:
        return None
    values = numbers(elements)
    if column.kind == "ragged":
        if not lengths.any():  # rows without entries fit any shape
            inner = list(column.inner)
        width = int(np.prod(inner)) if inner else 1
        if inner:
            invalid_rows.shapes[tuple(inner)] += len(lengths)
        return Ragged.from_lengths(values, lengths.astype(np.int64) * width, tuple(inner))
    return _fixed_width(values, lengths, tuple(inner), invalid_rows)


def _fixed_width(
    values: Array, lengths: Array, inner: tuple[int, ...], invalid_rows: InvalidRowCounts
) -> Array | None:
    width = _one_width(lengths, invalid_rows, inner)
    if width is None or 0 in inner:
        return None
    return values.reshape(len(lengths), width, *inner)


def _one_width(
    widths: Array, invalid_rows: InvalidRowCounts, inner: tuple[int, ...] = ()
) -> int | None:
    """Count the row shapes and return the common width, or None if widths differ or are 0.

    The shapes are (width, *inner).
    """
    different, rows = np.unique(widths, return_counts=True)
    invalid_rows.shapes.update(
        {(int(w), *inner): int(n) for w, n in zip(different, rows, strict=True)}
    )
    return (int(different[0]) or None) if len(different) == 1 else None


def _vectors(
    array: pa.StructArray, column: Column, invalid_rows: InvalidRowCounts
) -> Values | None:
    """Convert rows of Spark's vector struct: type 1 is dense (values only), type 0 sparse (size, indices, values)."""
    is_dense = numbers(array.field("type")) == 1
    lengths, elements = flattened(array.field("values"))
    sizes = lengths if is_dense.all() else np.where(is_dense, lengths, _sizes(array))
    width = _one_width(sizes, invalid_rows)
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
    """Convert vectors to sparse rows. A dense vector keeps its nonzero elements.

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


# ----------------------------------------------------------------------------------------------------
# Counts of unusable rows of a column, and sentences about them for the user.

_COUNTS = ("nulls", "nans", "infinities", "overflows", "inexact", "fractions")
# The policy "keep" accepts these values.
_KEPT = ("nans", "infinities")


@dataclass
class InvalidRowCounts:
    """Counts of the unusable rows of a column, and of the shapes of all rows.

    Attributes:
        nulls: rows that are null, or hold a null element.
        nans: rows with a NaN.
        infinities: rows with an infinity in the data.
        overflows: rows with a finite number beyond the range of the tensor's type.
        inexact: rows with an integer that the tensor's floating type cannot represent.
        fractions: rows with a fractional number although the stored type is an integer.
        shapes: shape of a row -> rows, for arrays and vectors; of a ragged column, the shape of a row's entries. -1
            marks lengths that differ inside a row.
        examples: name of a count -> the first number that it counted, as text.
    """

    nulls: int = 0
    nans: int = 0
    infinities: int = 0
    overflows: int = 0
    inexact: int = 0
    fractions: int = 0
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_clean(self) -> bool:
        """True if all rows can be used: no bad values, and one shape without an axis of 0."""
        has_elements = all(size > 0 for shape in self.shapes for size in shape)
        return not any(self.counts().values()) and len(self.shapes) <= 1 and has_elements

    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}

    def add(self, other: InvalidRowCounts) -> None:
        """Add the counts of another part of the data."""
        for name, count in other.counts().items():
            setattr(self, name, getattr(self, name) + count)
        self.shapes.update(other.shapes)
        self.examples = {**other.examples, **self.examples}

    def note(self, name: str, rows: int, values: Array, bad: Array) -> None:
        """Add `rows` to a count, and keep the first bad element of `values` as an example."""
        if rows:
            setattr(self, name, getattr(self, name) + rows)
            self.examples.setdefault(name, f"{values[bad].flat[0].item()!r}")

    def to_dict(self) -> dict[str, Any]:
        """Convert the counts to plain values for `from_dict`."""
        shapes = [[list(k), v] for k, v in self.shapes.items()]
        return {**self.counts(), "shapes": shapes, "examples": self.examples}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InvalidRowCounts:
        """Rebuild the counts from `to_dict`."""
        return cls(**{**values, "shapes": Counter({tuple(k): v for k, v in values["shapes"]})})


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape, as in "2 x 3" or "2 x ?". "?" means that lengths differ inside the row."""
    return " x ".join("?" if n < 0 else str(n) for n in shape)


def problems(
    column: Column, invalid_rows: InvalidRowCounts, num_rows: int, *, is_flag: bool = False
) -> Iterator[str]:
    """Yield a sentence for each problem of a column, with the number of rows and a remedy.

    Args:
        column: as `check_schema` returned it.
        invalid_rows: in all its rows.
        num_rows: number of its rows.
        is_flag: True for the validation column, to which `handle_invalid` does not apply.
    """
    where = f"column {column.name!r} ({column.source})"
    of = f"of {num_rows:,} rows"
    if invalid_rows.nulls and is_flag:
        yield (
            f"{where}: {invalid_rows.nulls:,} {of} are null. Every row needs a value that tells whether it is for validation: fill in "
            "0 or 1 before."
        )
    elif invalid_rows.nulls:
        yield (
            f"{where}: {invalid_rows.nulls:,} {of} are null or hold a null. Every row needs a value: df.na.drop() or "
            "df.na.fill(...), an Imputer, or handle_invalid='skip' or {column: value}."
        )
    if invalid_rows.nans:
        yield (
            f"{where}: {invalid_rows.nans:,} {of} hold NaN. Every value must be a number: drop or replace "
            f"them{'' if is_flag else _instead_of_nan(column)}."
        )
    if invalid_rows.infinities:
        yield (
            f"{where}: {invalid_rows.infinities:,} {of} hold infinity, for example {invalid_rows.examples['infinities']}. Every value must "
            "be finite: drop, cap or replace them, or give handle_invalid='skip' or {column: value}."
        )
    if invalid_rows.overflows:
        yield (
            f"{where}: {invalid_rows.overflows:,} {of} hold a number that {column.number_type} cannot hold, for example "
            f"{invalid_rows.examples['overflows']}. Scale the column, choose a wider type with feature_dtypes or label_dtypes, or "
            "give handle_invalid."
        )
    if invalid_rows.inexact:
        yield (
            f"{where}: {invalid_rows.inexact:,} {of} hold an integer that {column.number_type} cannot hold exactly, for example "
            f"{invalid_rows.examples['inexact']}. Scale the column, cast it to double if it may be rounded, choose a wider type with "
            "feature_dtypes or label_dtypes, or give handle_invalid; an index of an embedding stays int64 in an argument "
            "of its own (inputs)."
        )
    if invalid_rows.fractions:
        remedy = "Choose a floating type, or round the column"
        if not column.is_explicit:  # only classes are stored as integers by default
            remedy = "It holds classes, which are 0, 1, 2, ...: number them with a StringIndexer, or give a loss of values"
        yield (
            f"{where}: {invalid_rows.fractions:,} {of} hold a number that is not whole, but it is to be stored as {column.dtype}. {remedy}."
        )
    if len(invalid_rows.shapes) > 1:
        yield f"{where}: {_different_lengths(column, invalid_rows)}"
    elif any(0 in shape for shape in invalid_rows.shapes):
        yield f"{where}: every row is empty. At least one element per row is expected."


def _instead_of_nan(column: Column) -> str:
    """End of a sentence: the policies for a column with NaN."""
    policies = ", or give handle_invalid='skip' or {column: value}"
    if not column.holds_nan:
        return policies
    return f"{policies}. If NaN is meant, as for a loss that masks it, give handle_invalid={{{column.name!r}: 'keep'}}"


def _different_lengths(column: Column, invalid_rows: InvalidRowCounts) -> str:
    usual, count = invalid_rows.shapes.most_common(1)[0]
    others = ", ".join(
        f"{n:,} of {shape_text(w)}"
        for w, n in sorted(invalid_rows.shapes.items())[:6]
        if w != usual
    )
    remedy = "pad or cut them"
    if column.kind == "array":
        remedy += f", or give collate_fn={{{column.name!r}: pad(0)}} (sparkhvd.estimator.pad)"
    return (
        f"rows have different lengths: {count:,} rows of {shape_text(usual)} elements, but {others}. Every row "
        f"must have the same number of elements: {remedy}."
    )


# ----------------------------------------------------------------------------------------------------
# Convert numbers to the stored type of a column, and count the numbers that the tensor cannot hold.

# Bits of precision of each floating type.
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_TOO_LARGE = {
    name: (2 - 2.0 ** -_BITS[name]) * 2.0**exponent
    for name, exponent in (("float16", 15), ("bfloat16", 127), ("float32", 127))
}
_WHOLE = re.compile(r"int\b|decimal\(\d+,0\)")  # Spark's names


def narrowed(
    values: Values,
    column: Column,
    invalid_rows: InvalidRowCounts,
    *,
    is_flag: bool,
) -> Values:
    """Convert values to the stored dtype. Rows of any length keep their layout.

    Args:
        values: in Spark's type.
        column: as `check_schema` returned it.
        invalid_rows: counts rows with unusable numbers.
        is_flag: True for the validation column: store whether the value is above 0.
    """
    if isinstance(values, SparseRows):
        stored = narrowed(values.values, column, invalid_rows, is_flag=is_flag)
        assert isinstance(stored, Ragged)
        return SparseRows(values.indices, stored, values.width)
    flat = values.values if isinstance(values, Ragged) else values
    invalid = invalid_numbers(flat, column)
    if column.invalid[0] == "keep":
        invalid = {name: bad for name, bad in invalid.items() if name not in _KEPT}
    if column.invalid[0] == "fill" and invalid:
        fill = column.invalid[1]
        bad = np.logical_or.reduce(list(invalid.values()))
        if not holds(flat.dtype, fill):
            flat = flat.astype(np.float64)
        flat, invalid = np.where(bad, flat.dtype.type(fill), flat), {}
    rows_with: Callable[[Array], int] = _rows
    if isinstance(values, Ragged):
        rows_with = functools.partial(_ragged_rows, values.lengths)
    for name, bad in invalid.items():
        invalid_rows.note(name, rows_with(bad), flat, bad)
    converted = _converted(flat, column, invalid_rows, rows_with, is_flag=is_flag)
    if isinstance(values, Ragged):
        return Ragged(converted, values.starts, values.lengths, values.inner)
    return converted


def invalid_numbers(values: Array, column: Column) -> dict[str, Array]:
    """Mask the numbers that the column's tensor cannot hold, by name in `InvalidRowCounts`."""
    is_float, bits = values.dtype.kind == "f", _BITS.get(column.number_type)
    if not values.size or values.dtype.kind == "b" or not (is_float or bits):
        return {}
    is_whole = bits is not None and (not is_float or bool(_WHOLE.search(column.source)))
    too_large = _TOO_LARGE.get(column.number_type, math.inf)
    limit = min(too_large, 2.0**bits + 1) if is_whole and bits else too_large
    if not is_float and max(-np.iinfo(values.dtype).min, np.iinfo(values.dtype).max) < limit:
        return {}
    # Good data cost two comparisons and no memory. A NaN makes both comparisons false.
    with np.errstate(invalid="ignore"):
        if float(values.min()) > -limit and float(values.max()) < limit:
            return {}
    masks: dict[str, Array] = {}
    finite: Array = np.ones(values.shape, np.bool_)
    if is_float:
        masks = {"nans": np.isnan(values), "infinities": np.isinf(values)}
        finite = np.isfinite(values)
    if float((np.finfo if is_float else np.iinfo)(values.dtype).max) >= too_large:
        masks["overflows"] = finite & ((values >= too_large) | (values <= -too_large))
        finite &= ~masks["overflows"]
    if is_whole and bits:
        masks["inexact"] = finite & _inexact(np.where(finite, values, 0), bits)
    return {name: bad for name, bad in masks.items() if bad.any()}


def _inexact(values: Array, bits: int) -> Array:
    """Find whole numbers with more than `bits` significant bits, and doubles large enough to be rounded already."""
    if values.dtype.kind == "f":
        rounded = np.abs(values) >= 2.0**53
        return rounded | _inexact(np.where(rounded, 0, values).astype(np.int64), bits)
    if values.dtype.kind == "i":
        # abs() overflows for the minimum, but its bits are right as uint64.
        values = np.abs(values.astype(np.int64))
    magnitude = values.astype(np.uint64)
    lowest = np.maximum(magnitude & (~magnitude + np.uint64(1)), np.uint64(1))
    wrong: Array = magnitude // lowest >= np.uint64(1 << bits)
    return wrong


def _converted(
    values: Array,
    column: Column,
    invalid_rows: InvalidRowCounts,
    rows_with: Callable[[Array], int],
    *,
    is_flag: bool,
) -> Array:
    """Convert to the stored dtype, and count numbers that an integer type cannot hold."""
    target = np.dtype(column.dtype).newbyteorder("<")
    if column.tensor_dtype == "bool":
        return np.ascontiguousarray(values > 0 if is_flag else values != 0, dtype=target)
    if values.dtype.kind == "b":
        return np.ascontiguousarray(values, dtype=target)
    if target.kind == "f":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, dtype=target)
    limits = np.iinfo(target)
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        whole = finite & (values == np.rint(values))
        fractions = finite & ~whole
        # The largest int64 rounds up to 2**63 as a float, which is the first number beyond int64.
        fits = (values >= float(limits.min)) & (values < float(limits.max) + (limits.max < 2**53))
        invalid_rows.note("fractions", rows_with(fractions), values, fractions)
        invalid_rows.note("overflows", rows_with(whole & ~fits), values, whole & ~fits)
        return np.where(whole & fits, values, 0).astype(target)
    if target.itemsize < values.dtype.itemsize or target.kind != values.dtype.kind:
        beyond = (values < limits.min) | (values > limits.max)
        invalid_rows.note("overflows", rows_with(beyond), values, beyond)
    return np.ascontiguousarray(values, dtype=target)


def _ragged_rows(lengths: Array, bad: Array) -> int:
    """Count rows with at least one True. `bad` holds the rows of these lengths, concatenated."""
    return len(np.unique(np.repeat(np.arange(len(lengths)), lengths)[bad])) if bad.any() else 0


def _rows(bad: Array) -> int:
    """Count rows with at least one True."""
    return int(np.count_nonzero(bad.any(axis=tuple(range(1, bad.ndim)))))


# ----------------------------------------------------------------------------------------------------
# Replace the values of a group column by group numbers.


def numbered(batches: Iterator[pa.RecordBatch], index: int, first: int) -> Iterator[pa.RecordBatch]:
    """Number the groups of adjacent equal values over a partition's batches. Nulls stay null.

    Args:
        batches: of the partition, sorted by the column.
        index: of the column.
        first: number of the first group.
    """
    import pyarrow.compute as pc

    number, last = first - 1, None
    for batch in batches:
        values = batch.column(index)
        if not len(values):
            continue
        begins = np.empty(len(values), np.int64)
        begins[0] = last is None or not values[0].equals(last)
        begins[1:] = numbers(pc.fill_null(pc.not_equal(values[1:], values[:-1]), True))
        of_rows = number + np.cumsum(begins)
        number, last = int(of_rows[-1]), values[-1]
        array = numpy_to_array(of_rows)
        if values.null_count:
            array = pc.if_else(pc.is_valid(values), array, pa.scalar(None, pa.int64()))
        columns = [array if i == index else batch.column(i) for i in range(batch.num_columns)]
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
