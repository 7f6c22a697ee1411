"""Arrow columns, as Spark sends them, to numpy arrays of rows; counting what cannot be used.

No Python code runs per row. `pa.array` and `Array.to_numpy` import pandas, 0.3 s in every Python worker, and
pyarrow.compute takes another 0.1 s: `_numbers` and `numpy_to_array` go through the buffers instead, and only bad data
import those. Values that cannot be used are counted, not raised: the pass over the data goes on,
so that the user learns of all problems at once.
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

from sparkhvd.data.columns.ragged import Ragged, SparseRows, Values
from sparkhvd.data.columns.schema import Column

__all__ = [
    "Findings",
    "column_to_numpy",
    "numpy_to_array",
    "problems",
    "shape_text",
    "text_to_array",
    "usable_rows",
]

Array = npt.NDArray[Any]

# Of floating types: the bits of a number, and the first number that rounds to infinity.
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_TOO_LARGE = {
    name: (2 - 2.0 ** -_BITS[name]) * 2.0**exponent
    for name, exponent in (("float16", 15), ("bfloat16", 127), ("float32", 127))
}
_WHOLE = re.compile(r"int\b|decimal\(\d+,0\)")  # Spark's names


@dataclass
class Findings:
    """What is wrong with the rows of a column, in rows.

    Attributes:
        nulls: rows that are null, or hold a null element.
        nans: rows with a NaN.
        infinities: rows with an infinity that stood in the data.
        overflows: rows with a finite number beyond the range of the tensor's type.
        inexact: rows with an integer that the tensor's floating type does not have.
        fractions: rows with a number that is not whole although the stored type is an integer.
        shapes: shape of a row -> rows, for arrays and vectors; of a ragged column, the shape of a row's entries. -1
            stands where lengths differ inside a row.
        examples: by name of a count the first number that was counted there, as text.
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
        """Whether all rows can be used: no bad values, and one shape without an axis of 0."""
        usable = all(size > 0 for shape in self.shapes for size in shape)
        return not any(self.counts().values()) and len(self.shapes) <= 1 and usable

    def counts(self) -> dict[str, int]:
        """Rows by what is wrong with them."""
        return {name: getattr(self, name) for name in _COUNTS}

    def add(self, other: Findings) -> None:
        """Count what another part of the data has."""
        for name, count in other.counts().items():
            setattr(self, name, getattr(self, name) + count)
        self.shapes.update(other.shapes)
        self.examples = {**other.examples, **self.examples}

    def note(self, name: str, rows: int, values: Array, bad: Array) -> None:
        """Count rows that hold bad elements of `values`, and keep the first of these as an example."""
        if rows:
            setattr(self, name, getattr(self, name) + rows)
            self.examples.setdefault(name, f"{values[bad].flat[0].item()!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which `from_dict` rebuilds the findings."""
        shapes = [[list(k), v] for k, v in self.shapes.items()]
        return {**self.counts(), "shapes": shapes, "examples": self.examples}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Findings:
        """The findings that `to_dict` described."""
        return cls(**{**values, "shapes": Counter({tuple(k): v for k, v in values["shapes"]})})


_COUNTS = ("nulls", "nans", "infinities", "overflows", "inexact", "fractions")


def column_to_numpy(
    array: pa.Array, column: Column, *, is_flag: bool = False
) -> tuple[Values | None, Findings]:
    """Convert one batch of a column to a C-contiguous array (rows, *shape) of `column.dtype`, or to rows of any length.

    Args:
        array: as `mapInArrow` gives it; a vector is a struct<type, size, indices, values>.
        column: what `check_schema` made of it.
        is_flag: store whether the value is above 0 (a validation column).

    Returns:
        The values (`SparseRows` of a sparse vector, `Ragged` of other columns whose rows differ), or None if some row
        cannot be used, and what was found.
    """
    found = Findings()
    fill = column.invalid[1] if column.invalid[0] == "fill" else None
    if array.null_count:
        if fill is not None and column.kind == "scalar":
            array = _filled(array, fill, column.dtype)
        else:
            found.nulls = array.null_count
            array = array.drop_null()
    values: Values | None
    if column.kind in ("binary", "string"):
        values = _bytes(array)
        return (values if found.is_clean else None), found
    if column.kind == "scalar":
        values = _numbers(array)
    elif column.kind in ("vector", "sparse"):
        values = _vectors(array, column, found)
    else:
        values = _lists(array, column, found, fill)
    if values is None:
        return None, found
    stored = _narrowed(values, column, found, is_flag=is_flag, fill=fill)
    return (stored if found.is_clean else None), found


def usable_rows(array: pa.Array, column: Column) -> Array | None:
    """(rows,) bool: which rows are not null and hold neither null nor an invalid number; None means all."""
    bad = np.zeros(len(array), np.bool_)
    if array.null_count:
        bad |= _numbers(array.is_null())
    if column.kind in ("binary", "string"):
        return ~bad if bad.any() else None
    row_of: Array | None = None
    elements: Any = array.field("values") if pa.types.is_struct(array.type) else array
    while pa.types.is_list(elements.type) or pa.types.is_large_list(elements.type):
        # A null list is empty, as Spark's are.
        lengths, elements = _flat(elements)
        row_of = np.repeat(np.arange(len(lengths)) if row_of is None else row_of, lengths)
        if elements.null_count:
            bad[row_of[_numbers(elements.is_null())]] = True
    values = _numbers(elements)
    for invalid in _invalid(values, column).values():
        if row_of is None:  # memory below a null holds anything, and its row is bad already
            bad |= invalid
        else:
            bad[row_of[invalid]] = True
    return ~bad if bad.any() else None


def shape_text(shape: tuple[int, ...]) -> str:
    """A row's shape in words: "3", "2 x 3", or "2 x ?" where lengths differ inside the row."""
    return " x ".join("?" if n < 0 else str(n) for n in shape)


def problems(
    column: Column, found: Findings, num_rows: int, *, is_flag: bool = False
) -> Iterator[str]:
    """What is wrong with a column of so many rows, in sentences with counts and what to do.

    Args:
        column: what `check_schema` made of it.
        found: in all its rows.
        num_rows: how many these are.
        is_flag: it is the validation column, to which `handle_invalid` does not apply.
    """
    where = f"column {column.name!r} ({column.source})"
    of = f"of {num_rows:,} rows"
    if found.nulls and is_flag:
        yield (
            f"{where}: {found.nulls:,} {of} are null. Every row needs a value that tells whether it is for validation: fill in "
            "0 or 1 before."
        )
    elif found.nulls:
        yield (
            f"{where}: {found.nulls:,} {of} are null or hold a null. Every row needs a value: df.na.drop() or "
            "df.na.fill(...), an Imputer, or handle_invalid='skip' or {column: value}."
        )
    if found.nans:
        yield f"{where}: {found.nans:,} {of} hold NaN. Every value must be a number: drop or replace them."
    if found.infinities:
        yield (
            f"{where}: {found.infinities:,} {of} hold infinity, for example {found.examples['infinities']}. Every value must "
            "be finite: drop, cap or replace them, or give handle_invalid='skip' or {column: value}."
        )
    if found.overflows:
        yield (
            f"{where}: {found.overflows:,} {of} hold a number that {column.number_type} cannot hold, for example "
            f"{found.examples['overflows']}. Scale the column, choose a wider type with feature_dtypes or label_dtypes, or "
            "give handle_invalid."
        )
    if found.inexact:
        yield (
            f"{where}: {found.inexact:,} {of} hold an integer that {column.number_type} cannot hold exactly, for example "
            f"{found.examples['inexact']}. Scale the column, cast it to double if it may be rounded, choose a wider type with "
            "feature_dtypes or label_dtypes, or give handle_invalid; an index of an embedding stays int64 in an argument "
            "of its own (inputs)."
        )
    if found.fractions:
        yield (
            f"{where}: {found.fractions:,} {of} hold a number that is not whole, but it is to be stored as "
            f"{column.dtype}. Choose a floating type, or round the column."
        )
    if len(found.shapes) > 1:
        usual, count = found.shapes.most_common(1)[0]
        others = ", ".join(
            f"{n:,} of {shape_text(w)}" for w, n in sorted(found.shapes.items())[:6] if w != usual
        )
        remedy = "pad or cut them"
        if column.kind == "array":
            remedy += f", or give collate_fn={{{column.name!r}: pad(0)}} (sparkhvd.estimator.pad)"
        yield (
            f"{where}: rows have different lengths: {count:,} rows of {shape_text(usual)} elements, but {others}. Every row "
            f"must have the same number of elements: {remedy}."
        )
    elif any(0 in shape for shape in found.shapes):
        yield f"{where}: every row is empty. At least one element per row is expected."


def numpy_to_array(values: Array) -> pa.Array:
    """An Arrow array that shares the memory of a flat numpy array of numbers."""
    kind = pa.from_numpy_dtype(values.dtype)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def text_to_array(text: str) -> pa.Array:
    """An Arrow array of one string."""
    data = text.encode()
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])


def _numbers(array: Any) -> Array:
    """The memory of an Arrow array of numbers or booleans as numpy; where it is null, anything."""
    array = _without_decimals(array)
    length, buffer = len(array), array.buffers()[1]
    if pa.types.is_boolean(array.type):
        if not length:
            return np.empty(0, np.bool_)
        first, rest = divmod(array.offset, 8)
        data = np.frombuffer(buffer, np.uint8, offset=first)
        return np.unpackbits(data, count=rest + length, bitorder="little")[rest:].view(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not length:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, length, array.offset * dtype.itemsize)


def _without_decimals(array: Any) -> Any:
    """Decimals as int64 if they are whole and all of them fit, else as doubles; other arrays as they are."""
    kind = array.type
    if not pa.types.is_decimal(kind):
        return array
    if kind.scale == 0 and kind.bit_width == 128 and len(array):
        validity, data = array.buffers()
        halves = np.frombuffer(data, "<i8", 2 * len(array), 16 * array.offset).reshape(-1, 2)
        fits = halves[:, 1] == halves[:, 0] >> 63
        if array.null_count:  # below a null lies anything
            fits |= _numbers(array.is_null())
        if fits.all():
            # The bits of what is null stay where they are: the new values begin as far behind the front.
            values = np.zeros(array.offset + len(array), np.int64)
            values[array.offset :] = halves[:, 0]
            buffers = [validity, pa.py_buffer(values)]
            return pa.Array.from_buffers(
                pa.int64(), len(array), buffers, array.null_count, array.offset
            )
    return array.cast(pa.float64())


def _flat(lists: Any) -> tuple[Array, Any]:
    """Elements per row of an Arrow array of lists, and all of them; a null list must be empty, as Spark's are."""
    if not len(lists):
        return np.empty(0, np.int64), lists.values.slice(0, 0)
    offsets = _numbers(lists.offsets)
    return np.diff(offsets), lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def _filled(array: Any, value: Any, dtype: str) -> Any:
    """The array with a number in place of its nulls; in a wider type where its own cannot hold the number.

    Args:
        array: numbers or booleans.
        value: that the stored dtype can hold.
        dtype: the stored one.
    """
    if pa.types.is_boolean(array.type):
        return array.fill_null(bool(value))
    array = _without_decimals(array)
    own = np.dtype(array.type.to_pandas_dtype())
    if not _holds(own, value):
        is_whole = own.kind in "iu" and np.dtype(dtype).kind in "iu"
        array = _widened(array, is_whole=is_whole)
    return array.fill_null(int(value) if pa.types.is_integer(array.type) else value)


def _widened(array: Any, *, is_whole: bool) -> Any:
    """An array of numbers as int64 or double."""
    if is_whole:
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:  # as doubles, numbers that no int64 holds are counted
            pass
    if array.type == pa.float16():  # older pyarrows do not cast it
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        return pa.array(_numbers(array).astype(np.float64), mask=nulls)
    return array.cast(pa.float64(), safe=False)


def _holds(dtype: np.dtype[Any], value: Any) -> bool:
    """Whether a number is one of a type, or for floating types within its range."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(
            math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
        )
    return bool(not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max))


def _bytes(array: Any) -> Ragged:
    """The bytes of an Arrow array of binary or string values; text as UTF-8."""
    is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    if not len(array):
        return Ragged.empty(np.uint8)
    offset_type = np.dtype(np.int64 if is_large else np.int32)
    _, offsets, data = array.buffers()
    ends = np.frombuffer(
        offsets, offset_type, len(array) + 1, array.offset * offset_type.itemsize
    ).astype(np.int64)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Ragged(values, ends[:-1], np.diff(ends))


def _lists(array: Any, column: Column, found: Findings, fill: Any) -> Values | None:
    """Rows of arrays, also nested: one array if they have one shape, else (for ragged columns) rows."""
    lengths, elements = _flat(array)
    row_of = None
    has_all = True
    inner: list[int] = []
    while True:
        if elements.null_count:
            row_of = np.repeat(np.arange(len(lengths)), lengths) if row_of is None else row_of
            is_list = pa.types.is_list(elements.type) or pa.types.is_large_list(elements.type)
            if fill is not None and not is_list:
                elements = _filled(elements, fill, column.dtype)
            else:
                found.nulls += len(np.unique(row_of[_numbers(elements.is_null())]))
                if not is_list:
                    is_bool = pa.types.is_boolean(elements.type)
                    elements = _filled(elements, False if is_bool else 0, column.dtype)
        if not (pa.types.is_list(elements.type) or pa.types.is_large_list(elements.type)):
            break
        row_of = np.repeat(np.arange(len(lengths)), lengths) if row_of is None else row_of
        is_there = ~_numbers(elements.is_null()) if elements.null_count else slice(None)
        has_all = has_all and not elements.null_count
        below, elements = _flat(elements)
        widths, counts = np.unique(below[is_there], return_counts=True)
        if len(widths) > 1:
            usual = widths[counts.argmax()]
            odd = len(np.unique(row_of[below != usual]))
            found.shapes[(*inner, -1)] += odd
            found.shapes[(*inner, int(usual))] += len(lengths) - odd
            return None
        if len(widths):
            inner.append(int(widths[0]))
        row_of = np.repeat(row_of, below)
    if not has_all:
        return None
    values = _numbers(elements)
    if column.kind == "ragged":
        if not lengths.any():  # rows without entries have entries of any shape
            inner = list(column.inner)
        width = int(np.prod(inner)) if inner else 1
        if inner:
            found.shapes[tuple(inner)] += len(lengths)
        return Ragged.from_lengths(values, lengths.astype(np.int64) * width, tuple(inner))
    return _fixed_width(values, lengths, tuple(inner), found)


def _fixed_width(
    values: Array, lengths: Array, inner: tuple[int, ...], found: Findings
) -> Array | None:
    widths, rows = np.unique(lengths, return_counts=True)
    found.shapes.update({(int(w), *inner): int(n) for w, n in zip(widths, rows, strict=True)})
    if len(widths) == 1 and widths[0] > 0 and 0 not in inner:
        return values.reshape(len(lengths), int(widths[0]), *inner)
    return None


def _vectors(array: Any, column: Column, found: Findings) -> Values | None:
    """Rows of Spark's vector struct: type 1 is dense (values only), type 0 sparse (size, indices, values)."""
    is_dense = _numbers(array.field("type")) == 1
    lengths, elements = _flat(array.field("values"))
    sizes = lengths if is_dense.all() else np.where(is_dense, lengths, _sizes(array))
    widths, rows = np.unique(sizes, return_counts=True)
    found.shapes.update({(int(w),): int(n) for w, n in zip(widths, rows, strict=True)})
    if len(widths) != 1 or widths[0] == 0:
        return None
    width, values = int(widths[0]), _numbers(elements)
    if not column.keeps_sparse(width):
        if is_dense.all():
            return values.reshape(len(sizes), width)
        out = np.zeros((len(sizes), width), np.float64)
        of_dense = np.repeat(is_dense, lengths)
        out[is_dense] = values[of_dense].reshape(-1, width)
        sparse_rows = np.repeat(np.arange(len(sizes)), np.where(is_dense, 0, lengths))
        out[sparse_rows, _indices(array)] = values[~of_dense]
        return out
    lengths = lengths.astype(np.int64)
    if not is_dense.any():
        indices = _indices(array)
    else:
        # A dense row among them: what is not zero, with its position in the row.
        of_dense = np.repeat(is_dense, lengths)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.arange(len(values)) - begins).astype(np.int32)
        positions[~of_dense] = _indices(array)
        is_kept = ~of_dense | (values != 0)
        row_of = np.repeat(np.arange(len(sizes)), lengths)[is_kept]
        lengths = np.bincount(row_of, minlength=len(sizes)).astype(np.int64)
        indices, values = positions[is_kept], values[is_kept]
    return SparseRows(
        Ragged.from_lengths(indices, lengths), Ragged.from_lengths(values, lengths), width
    )


def _sizes(array: Any) -> Array:
    return _numbers(array.field("size"))


def _indices(array: Any) -> Array:
    return _numbers(_flat(array.field("indices"))[1])


def _narrowed(
    values: Values, column: Column, found: Findings, *, is_flag: bool, fill: Any
) -> Values:
    """Values in the stored dtype; rows of any length keep their layout."""
    if isinstance(values, SparseRows):
        stored = _narrowed(values.values, column, found, is_flag=is_flag, fill=fill)
        assert isinstance(stored, Ragged)
        return SparseRows(values.indices, stored, values.width)
    flat = values.values if isinstance(values, Ragged) else values
    invalid = _invalid(flat, column)
    if fill is not None and invalid:
        bad = np.logical_or.reduce(list(invalid.values()))
        if not _holds(flat.dtype, fill):
            flat = flat.astype(np.float64)
        flat, invalid = np.where(bad, flat.dtype.type(fill), flat), {}
    rows_with: Callable[[Array], int] = _rows
    if isinstance(values, Ragged):
        rows_with = functools.partial(_ragged_rows, values.lengths)
    for name, bad in invalid.items():
        found.note(name, rows_with(bad), flat, bad)
    stored = _narrow(flat, column, found, rows_with, is_flag=is_flag)
    if isinstance(values, Ragged):
        return Ragged(stored, values.starts, values.lengths, values.inner)
    return stored


def _invalid(values: Array, column: Column) -> dict[str, Array]:
    """Which numbers a tensor of the column cannot hold, by name of their count in `Findings`; empty if there are none."""
    is_float, bits = values.dtype.kind == "f", _BITS.get(column.number_type)
    if not values.size or values.dtype.kind == "b" or not (is_float or bits):
        return {}
    is_whole = bits is not None and (not is_float or bool(_WHOLE.search(column.source)))
    too_large = _TOO_LARGE.get(column.number_type, math.inf)
    limit = min(too_large, 2.0**bits + 1) if is_whole and bits else too_large
    if not is_float and max(-np.iinfo(values.dtype).min, np.iinfo(values.dtype).max) < limit:
        return {}
    # All that good data cost: two looks, and no memory. NaN is neither above nor below.
    with np.errstate(invalid="ignore"):
        if float(values.min()) > -limit and float(values.max()) < limit:
            return {}
    found: dict[str, Array] = {}
    finite: Array = np.ones(values.shape, np.bool_)
    if is_float:
        found = {"nans": np.isnan(values), "infinities": np.isinf(values)}
        finite = np.isfinite(values)
    if float((np.finfo if is_float else np.iinfo)(values.dtype).max) >= too_large:
        found["overflows"] = finite & ((values >= too_large) | (values <= -too_large))
        finite &= ~found["overflows"]
    if is_whole and bits:
        found["inexact"] = finite & _inexact(np.where(finite, values, 0), bits)
    return {name: bad for name, bad in found.items() if bad.any()}


def _inexact(values: Array, bits: int) -> Array:
    """Which whole numbers do not fit a floating type of so many bits; of doubles all that may have been rounded."""
    if values.dtype.kind == "f":
        rounded = np.abs(values) >= 2.0**53
        return rounded | _inexact(np.where(rounded, 0, values).astype(np.int64), bits)
    if values.dtype.kind == "i":
        values = np.abs(values.astype(np.int64))  # of the least one the bits are right, as uint64
    magnitude = values.astype(np.uint64)
    lowest = np.maximum(magnitude & (~magnitude + np.uint64(1)), np.uint64(1))
    wrong: Array = magnitude // lowest >= np.uint64(1 << bits)
    return wrong


def _narrow(
    values: Array,
    column: Column,
    found: Findings,
    rows_with: Callable[[Array], int],
    *,
    is_flag: bool,
) -> Array:
    """Values in the stored dtype; what an integer type cannot hold is counted."""
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
        # 2**63 as a float is the first that no int64 holds, and the limit itself rounds up to it.
        fits = (values >= float(limits.min)) & (values < float(limits.max) + (limits.max < 2**53))
        found.note("fractions", rows_with(fractions), values, fractions)
        found.note("overflows", rows_with(whole & ~fits), values, whole & ~fits)
        return np.where(whole & fits, values, 0).astype(target)
    if target.itemsize < values.dtype.itemsize or target.kind != values.dtype.kind:
        beyond = (values < limits.min) | (values > limits.max)
        found.note("overflows", rows_with(beyond), values, beyond)
    return np.ascontiguousarray(values, dtype=target)


def _ragged_rows(lengths: Array, bad: Array) -> int:
    """Rows of these lengths, one behind the other, with at least one True."""
    return len(np.unique(np.repeat(np.arange(len(lengths)), lengths)[bad])) if bad.any() else 0


def _rows(bad: Array) -> int:
    """Rows with at least one True."""
    return int(np.count_nonzero(bad.any(axis=tuple(range(1, bad.ndim)))))
