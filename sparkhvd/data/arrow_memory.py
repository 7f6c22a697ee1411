"""Memory of Arrow arrays as numpy arrays and back.

No Python code runs per row. `pa.array` and `Array.to_numpy` import pandas, 0.3 s in every Python worker, and
pyarrow.compute takes another 0.1 s: these functions go through the buffers instead, and only bad data import those.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data.columns.ragged import Ragged

__all__ = [
    "byte_rows",
    "filled",
    "flattened",
    "holds",
    "is_list",
    "numbers",
    "numpy_to_array",
    "text_to_array",
]

Array = npt.NDArray[Any]


def numpy_to_array(values: Array) -> pa.Array:
    """Wrap a flat numpy array of numbers as an Arrow array; both share their memory."""
    kind = pa.from_numpy_dtype(values.dtype)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def text_to_array(text: str) -> pa.Array:
    """Return an Arrow array of one string."""
    data = text.encode()
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])


def numbers(array: pa.Array) -> Array:
    """View an Arrow array of numbers or booleans as numpy; where it is null, any value may stand."""
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


def _without_decimals(array: pa.Array) -> pa.Array:
    """Convert decimals to int64 if they are whole and all of them fit, else to doubles; return other arrays as they are."""
    kind = array.type
    if not pa.types.is_decimal(kind):
        return array
    if kind.scale == 0 and kind.bit_width == 128 and len(array):
        validity, data = array.buffers()
        halves = np.frombuffer(data, "<i8", 2 * len(array), 16 * array.offset).reshape(-1, 2)
        fits = halves[:, 1] == halves[:, 0] >> 63
        if array.null_count:  # below a null lies anything
            fits |= numbers(array.is_null())
        if fits.all():
            # The bits of what is null stay where they are: the new values begin as far behind the front.
            values = np.zeros(array.offset + len(array), np.int64)
            values[array.offset :] = halves[:, 0]
            buffers = [validity, pa.py_buffer(values)]
            return pa.Array.from_buffers(
                pa.int64(), len(array), buffers, array.null_count, array.offset
            )
    return array.cast(pa.float64())


def is_list(kind: pa.DataType) -> bool:
    """Return True for lists of any length, with offsets of either size."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def flattened(lists: pa.ListArray) -> tuple[Array, pa.Array]:
    """Return elements per row, and all elements; a null list must be empty, as Spark's are."""
    if not len(lists):
        return np.empty(0, np.int64), lists.values.slice(0, 0)
    offsets = numbers(lists.offsets)
    return np.diff(offsets), lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def byte_rows(array: pa.Array) -> Ragged:
    """View an Arrow array of binary or string values as rows of bytes; text as UTF-8."""
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


def filled(array: pa.Array, value: float, dtype: str) -> pa.Array:
    """Put a number in place of nulls; in a wider type where the array's own cannot hold the number.

    Args:
        array: numbers or booleans.
        value: that the stored dtype can hold.
        dtype: the stored one.
    """
    if pa.types.is_boolean(array.type):
        return array.fill_null(bool(value))
    array = _without_decimals(array)
    current = np.dtype(array.type.to_pandas_dtype())
    if not holds(current, value):
        is_whole = current.kind in "iu" and np.dtype(dtype).kind in "iu"
        array = _widened(array, is_whole=is_whole)
    return array.fill_null(int(value) if pa.types.is_integer(array.type) else value)


def _widened(array: pa.Array, *, is_whole: bool) -> pa.Array:
    """Convert numbers to int64 or double."""
    if is_whole:
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:  # as doubles, numbers that no int64 holds are counted
            pass
    if array.type == pa.float16():  # older pyarrows do not cast it
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        return pa.array(numbers(array).astype(np.float64), mask=nulls)
    return array.cast(pa.float64(), safe=False)


def holds(dtype: np.dtype[Any], value: float) -> bool:
    """Return True if a type has this number, or for floating types if it is within their range."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(
            math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
        )
    return bool(not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max))
