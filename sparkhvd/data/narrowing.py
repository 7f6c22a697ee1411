"""Numbers in the type that a column stores; counting those that the tensor cannot hold."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkhvd.data.arrow_memory import holds
from sparkhvd.data.columns.ragged import Ragged, SparseRows, Values
from sparkhvd.data.columns.schema import Column
from sparkhvd.data.findings import Findings

__all__ = ["invalid_numbers", "narrowed"]

Array = npt.NDArray[Any]

# Of floating types: the bits of a number, and the first number that rounds to infinity.
_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_TOO_LARGE = {
    name: (2 - 2.0 ** -_BITS[name]) * 2.0**exponent
    for name, exponent in (("float16", 15), ("bfloat16", 127), ("float32", 127))
}
_WHOLE = re.compile(r"int\b|decimal\(\d+,0\)")  # Spark's names


def narrowed(
    values: Values, column: Column, findings: Findings, *, is_flag: bool, fill: float | None
) -> Values:
    """Convert values to the stored dtype; rows of any length keep their layout.

    Args:
        values: as Spark has them.
        column: as `check_schema` returned it.
        findings: where rows with numbers that cannot be used are counted.
        is_flag: store whether the value is above 0 (a validation column).
        fill: takes the place of such numbers; None counts them.
    """
    if isinstance(values, SparseRows):
        stored = narrowed(values.values, column, findings, is_flag=is_flag, fill=fill)
        assert isinstance(stored, Ragged)
        return SparseRows(values.indices, stored, values.width)
    flat = values.values if isinstance(values, Ragged) else values
    invalid = invalid_numbers(flat, column)
    if fill is not None and invalid:
        bad = np.logical_or.reduce(list(invalid.values()))
        if not holds(flat.dtype, fill):
            flat = flat.astype(np.float64)
        flat, invalid = np.where(bad, flat.dtype.type(fill), flat), {}
    rows_with: Callable[[Array], int] = _rows
    if isinstance(values, Ragged):
        rows_with = functools.partial(_ragged_rows, values.lengths)
    for name, bad in invalid.items():
        findings.note(name, rows_with(bad), flat, bad)
    converted = _converted(flat, column, findings, rows_with, is_flag=is_flag)
    if isinstance(values, Ragged):
        return Ragged(converted, values.starts, values.lengths, values.inner)
    return converted


def invalid_numbers(values: Array, column: Column) -> dict[str, Array]:
    """Find the numbers that a tensor of the column cannot hold: masks by name of their count in `Findings`, if any."""
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
    """Find whole numbers that do not fit a floating type of so many bits; of doubles all that may have been rounded."""
    if values.dtype.kind == "f":
        rounded = np.abs(values) >= 2.0**53
        return rounded | _inexact(np.where(rounded, 0, values).astype(np.int64), bits)
    if values.dtype.kind == "i":
        values = np.abs(values.astype(np.int64))  # of the least one the bits are right, as uint64
    magnitude = values.astype(np.uint64)
    lowest = np.maximum(magnitude & (~magnitude + np.uint64(1)), np.uint64(1))
    wrong: Array = magnitude // lowest >= np.uint64(1 << bits)
    return wrong


def _converted(
    values: Array,
    column: Column,
    findings: Findings,
    rows_with: Callable[[Array], int],
    *,
    is_flag: bool,
) -> Array:
    """Convert to the stored dtype, and count what an integer type cannot hold."""
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
        findings.note("fractions", rows_with(fractions), values, fractions)
        findings.note("overflows", rows_with(whole & ~fits), values, whole & ~fits)
        return np.where(whole & fits, values, 0).astype(target)
    if target.itemsize < values.dtype.itemsize or target.kind != values.dtype.kind:
        beyond = (values < limits.min) | (values > limits.max)
        findings.note("overflows", rows_with(beyond), values, beyond)
    return np.ascontiguousarray(values, dtype=target)


def _ragged_rows(lengths: Array, bad: Array) -> int:
    """Count rows of these lengths, one behind the other, with at least one True."""
    return len(np.unique(np.repeat(np.arange(len(lengths)), lengths)[bad])) if bad.any() else 0


def _rows(bad: Array) -> int:
    """Count rows with at least one True."""
    return int(np.count_nonzero(bad.any(axis=tuple(range(1, bad.ndim)))))
