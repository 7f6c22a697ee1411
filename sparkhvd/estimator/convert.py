"""Arrow columns, as Spark sends them, to numpy arrays of rows; counting what cannot be used.

No Python code runs per row. `pa.array` and `Array.to_numpy` import pandas, 0.3 s in every Python worker, and
pyarrow.compute takes another 0.1 s: `_numbers` and `numpy_to_array` go through the buffers instead, and only bad data
import those. Values that cannot be used are counted, not raised: the pass over the data goes on,
so that the user learns of all problems at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.estimator.schema import Column

__all__ = ["Findings", "column_to_numpy", "numpy_to_array", "text_to_array"]

Array = npt.NDArray[Any]


@dataclass
class Findings:
    """What is wrong with the rows of a column, in rows.

    Attributes:
        nulls: rows that are null, or hold a null element.
        nans: rows with a NaN. (Infinity in the source is a value like others, and stays.)
        overflows: rows with a finite number that the stored type cannot hold.
        fractions: rows with a number that is not whole although the stored type is an integer.
        widths: elements per row -> rows, for arrays and vectors.
    """

    nulls: int = 0
    nans: int = 0
    overflows: int = 0
    fractions: int = 0
    widths: Counter[int] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether all rows can be used: no bad values, and one width above 0."""
        bad_rows = self.nulls or self.nans or self.overflows or self.fractions
        return not bad_rows and len(self.widths) <= 1 and 0 not in self.widths

    def add(self, other: Findings) -> None:
        """Count what another part of the data has."""
        self.nulls += other.nulls
        self.nans += other.nans
        self.overflows += other.overflows
        self.fractions += other.fractions
        self.widths.update(other.widths)

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which `from_dict` rebuilds the findings."""
        values = {"nulls": self.nulls, "nans": self.nans, "overflows": self.overflows}
        return {
            **values,
            "fractions": self.fractions,
            "widths": {str(k): v for k, v in self.widths.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Findings:
        """The findings that `to_dict` described."""
        widths = Counter({int(k): v for k, v in values["widths"].items()})
        return cls(
            values["nulls"], values["nans"], values["overflows"], values["fractions"], widths
        )


def column_to_numpy(
    array: pa.Array, column: Column, *, is_flag: bool = False
) -> tuple[Array | None, Findings]:
    """Convert one batch of a column to a C-contiguous array (rows, *shape) of `column.dtype`.

    Args:
        array: as `mapInArrow` gives it; a vector is a struct<type, size, indices, values>.
        column: what `check_schema` made of it.
        is_flag: store whether the value is above 0 (a validation column).

    Returns:
        The array, or None if some row cannot be used, and what was found.
    """
    found = Findings()
    if array.null_count:
        found.nulls = array.null_count
        array = array.drop_null()
    values: Array | None
    if column.kind == "scalar":
        values = _numbers(array)
    elif column.kind == "vector":
        values = _vectors(array, found)
    else:
        values = _lists(array, found)
    if values is None:
        return None, found
    stored = _narrow(values, column, found, is_flag=is_flag)
    return (stored if found.is_clean else None), found


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


def _flat(lists: Any) -> tuple[Array, Any]:
    """Elements per row of an Arrow array of lists, and all of them; a null list must be empty, as Spark's are."""
    if not len(lists):
        return np.empty(0, np.int64), lists.values.slice(0, 0)
    offsets = _numbers(lists.offsets)
    return np.diff(offsets), lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def _lists(array: Any, found: Findings) -> Array | None:
    lengths, elements = _flat(array)
    if elements.null_count:
        bad = _numbers(elements.is_null())
        found.nulls += len(np.unique(np.repeat(np.arange(len(lengths)), lengths)[bad]))
        elements = elements.fill_null(False if pa.types.is_boolean(elements.type) else 0)
    values = _numbers(elements)
    return _fixed_width(values, lengths, found)


def _fixed_width(values: Array, lengths: Array, found: Findings) -> Array | None:
    widths, rows = np.unique(lengths, return_counts=True)
    found.widths.update({int(w): int(n) for w, n in zip(widths, rows, strict=True)})
    if len(widths) == 1 and widths[0] > 0:
        return values.reshape(len(lengths), int(widths[0]))
    return None


def _vectors(array: Any, found: Findings) -> Array | None:
    """Rows of Spark's vector struct: type 1 is dense (values only), type 0 sparse (size, indices, values)."""
    is_dense = _numbers(array.field("type")) == 1
    packed = array.field("values")
    if is_dense.all():
        return _lists(packed, found)
    lengths, elements = _flat(packed)
    sizes = np.where(is_dense, lengths, _numbers(array.field("size")))
    widths, rows = np.unique(sizes, return_counts=True)
    found.widths.update({int(w): int(n) for w, n in zip(widths, rows, strict=True)})
    if len(widths) != 1 or widths[0] == 0:
        return None
    width = int(widths[0])
    out = np.zeros((len(sizes), width), np.float64)
    values = _numbers(elements)
    of_dense = np.repeat(is_dense, lengths)
    out[is_dense] = values[of_dense].reshape(-1, width)
    sparse_rows = np.repeat(np.arange(len(sizes)), np.where(is_dense, 0, lengths))
    columns = _numbers(_flat(array.field("indices"))[1])
    out[sparse_rows, columns] = values[~of_dense]
    return out


def _narrow(values: Array, column: Column, found: Findings, *, is_flag: bool) -> Array:
    """Values in the stored dtype; what does not fit is counted."""
    target = np.dtype(column.dtype).newbyteorder("<")
    from_float = values.dtype.kind == "f"
    if from_float and not np.isfinite(values).all():
        found.nans += _rows(np.isnan(values))
    if column.tensor_dtype == "bool":
        return np.ascontiguousarray(values > 0 if is_flag else values != 0, dtype=target)
    if values.dtype.kind == "b":
        return np.ascontiguousarray(values, dtype=target)
    if target.kind == "f":
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(values, dtype=target)
        # Only a narrower type can lose a finite number.
        if target.itemsize < values.dtype.itemsize and not np.isfinite(stored).all():
            found.overflows += _rows(np.isinf(stored) & np.isfinite(values))
        return stored
    limits = np.iinfo(target)
    if from_float:
        whole = np.isfinite(values) & (values == np.rint(values))
        found.fractions += _rows(~whole & ~np.isnan(values))
        # 2**63 as a float is the first that no int64 holds, and the limit itself rounds up to it.
        fits = (values >= float(limits.min)) & (values < float(limits.max) + (limits.max < 2**53))
        found.overflows += _rows(whole & ~fits)
        return np.where(whole & fits, values, 0).astype(target)
    if target.itemsize < values.dtype.itemsize or target.kind != values.dtype.kind:
        found.overflows += _rows((values < limits.min) | (values > limits.max))
    return np.ascontiguousarray(values, dtype=target)


def _rows(bad: Array) -> int:
    """Rows with at least one True."""
    return int(np.count_nonzero(bad.any(axis=1) if bad.ndim > 1 else bad))
