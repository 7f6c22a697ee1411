"""Arrow columns, as Spark sends them, to numpy arrays of rows; counting what cannot be used.

No Python code runs per row. pyarrow.compute takes 0.1 s to import, so only bad data import it. Values that cannot be used are counted, not raised: the pass over the data goes on,
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

__all__ = ["Findings", "column_to_numpy"]

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
    if column.kind == "scalar":
        values = array.to_numpy(zero_copy_only=False)
    elif column.kind == "vector":
        values = _vectors(array, found)
    else:
        values = _lists(array, found)
    if values is None:
        return None, found
    stored = _narrow(values, column, found, is_flag=is_flag)
    return (stored if found.is_clean else None), found


def _lists(array: Any, found: Findings) -> Array | None:
    lengths = np.diff(array.offsets.to_numpy())
    elements = array.flatten()
    if elements.null_count:
        bad = elements.is_null().to_numpy(zero_copy_only=False)
        found.nulls += len(np.unique(np.repeat(np.arange(len(lengths)), lengths)[bad]))
        elements = elements.fill_null(False if pa.types.is_boolean(elements.type) else 0)
    values = elements.to_numpy(zero_copy_only=False)
    return _fixed_width(values, lengths, found)


def _fixed_width(values: Array, lengths: Array, found: Findings) -> Array | None:
    widths, rows = np.unique(lengths, return_counts=True)
    found.widths.update({int(w): int(n) for w, n in zip(widths, rows, strict=True)})
    if len(widths) == 1 and widths[0] > 0:
        return values.reshape(len(lengths), int(widths[0]))
    return None


def _vectors(array: Any, found: Findings) -> Array | None:
    """Rows of Spark's vector struct: type 1 is dense (values only), type 0 sparse (size, indices, values)."""
    is_dense = array.field("type").to_numpy(zero_copy_only=False) == 1
    packed = array.field("values")
    if is_dense.all():
        return _lists(packed, found)
    lengths = np.diff(packed.offsets.to_numpy())
    sizes = np.where(
        is_dense, lengths, array.field("size").fill_null(0).to_numpy(zero_copy_only=False)
    )
    widths, rows = np.unique(sizes, return_counts=True)
    found.widths.update({int(w): int(n) for w, n in zip(widths, rows, strict=True)})
    if len(widths) != 1 or widths[0] == 0:
        return None
    width = int(widths[0])
    out = np.zeros((len(sizes), width), np.float64)
    values = packed.flatten().to_numpy(zero_copy_only=False)
    of_dense = np.repeat(is_dense, lengths)
    out[is_dense] = values[of_dense].reshape(-1, width)
    sparse_rows = np.repeat(np.arange(len(sizes)), np.where(is_dense, 0, lengths))
    columns = array.field("indices").flatten().to_numpy(zero_copy_only=False)
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
