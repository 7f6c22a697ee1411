"""Types of Arrow beyond those that Spark sends: the Spark type of each, and its arrays in Spark's own forms.

Parquet from anywhere has lists of a fixed length, dictionaries, tensors and unsigned numbers; `plain` turns their arrays
into the forms that `column_to_numpy` reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

__all__ = ["VERIFIED", "num_leaves", "plain", "spark_type"]

Mask = npt.NDArray[np.bool_]

# Arguments of `ParquetFile` that verify pages which have a checksum; pyarrow 14 cannot.
_ARGUMENTS = inspect.signature(pq.ParquetFile).parameters
VERIFIED = {n: True for n in ("page_checksum_verification",) if n in _ARGUMENTS}

_VECTOR_FIELDS = {"type", "size", "indices", "values"}  # Spark ML's vectors, as Spark writes them


def spark_type(kind: pa.DataType) -> DataType:
    """Return the Spark type by which `check_schema` judges an Arrow type; only for the driver, which has pyspark."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as T  # noqa: N812 - everyone's name

    t = pa.types
    if t.is_dictionary(kind):
        return spark_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        nested = spark_type(kind.storage_type)
        shape = getattr(kind, "shape", None) or ()
        for _ in shape[1:]:
            nested = T.ArrayType(nested)
        return nested
    if _is_any_list(kind):
        return T.ArrayType(spark_type(kind.value_type))
    if t.is_decimal(kind):
        return T.DecimalType(min(kind.precision, 38), min(kind.scale, 38))
    if t.is_struct(kind):
        names = {kind.field(i).name for i in range(kind.num_fields)}
        if names == _VECTOR_FIELDS:
            return VectorUDT()
        fields = (kind.field(i) for i in range(kind.num_fields))
        return T.StructType([T.StructField(f.name, spark_type(f.type)) for f in fields])
    if t.is_map(kind):
        return T.MapType(spark_type(kind.key_type), spark_type(kind.item_type))
    tests: tuple[tuple[Callable[[pa.DataType], bool], type[DataType]], ...] = (
        (t.is_boolean, T.BooleanType),
        (t.is_int8, T.ByteType),
        (lambda k: t.is_int16(k) or t.is_uint8(k), T.ShortType),
        (lambda k: t.is_int32(k) or t.is_uint16(k), T.IntegerType),
        (t.is_integer, T.LongType),  # numbers of uint64 that no int64 holds are found in the data
        (lambda k: t.is_float16(k) or t.is_float32(k), T.FloatType),
        (t.is_float64, T.DoubleType),
        (lambda k: t.is_string(k) or t.is_large_string(k) or _is(k, "string_view"), T.StringType),
        (lambda k: t.is_binary(k) or t.is_large_binary(k) or _is(k, "binary_view"), T.BinaryType),
        (t.is_fixed_size_binary, T.BinaryType),
        (t.is_date, T.DateType),
        (t.is_temporal, T.TimestampType),
    )
    return next((made() for test, made in tests if test(kind)), T.NullType())


def num_leaves(kind: pa.DataType) -> int:
    """Count the Parquet columns that a top-level column of this type takes."""
    if isinstance(kind, pa.BaseExtensionType):
        return num_leaves(kind.storage_type)
    if pa.types.is_map(kind):
        return num_leaves(kind.key_type) + num_leaves(kind.item_type)
    if _is_any_list(kind):
        return num_leaves(kind.value_type)
    if pa.types.is_struct(kind):
        return sum(num_leaves(kind.field(i).type) for i in range(kind.num_fields))
    return 1


def plain(array: pa.Array) -> pa.Array:
    """Convert an array to the forms that Spark sends: lists with offsets, values as they are, bytes with offsets."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _tensor(array, getattr(kind, "shape", None) or (), _order(kind))
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if pa.types.is_fixed_size_binary(kind):
        return _fixed_bytes(array)
    if _is_view(kind):
        return plain(array.cast(_without_view(kind)))
    if pa.types.is_fixed_size_list(kind):
        return _fixed_lists(array)
    if _is_any_list(kind) and _needs_change(kind.value_type):
        values = plain(array.values)
        wrap = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        validity, offsets = array.buffers()[:2]
        return pa.Array.from_buffers(
            wrap(values.type),
            len(array),
            [validity, offsets],
            array.null_count,
            array.offset,
            [values],
        )
    return array


def _is_any_list(kind: pa.DataType) -> bool:
    t = pa.types
    is_view = _is(kind, "list_view") or _is(kind, "large_list_view")
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) or is_view)


def _is(kind: pa.DataType, name: str) -> bool:
    """Return True for a type of this name, which older pyarrows may not have."""
    test = getattr(pa.types, f"is_{name}", None)
    return test is not None and bool(test(kind))


def _is_view(kind: pa.DataType) -> bool:
    """Return True for layouts of other libraries (polars), whose values lie anywhere."""
    return any(
        _is(kind, name) for name in ("string_view", "binary_view", "list_view", "large_list_view")
    )


def _without_view(kind: pa.DataType) -> pa.DataType:
    if _is(kind, "string_view"):
        return pa.large_string()
    if _is(kind, "binary_view"):
        return pa.large_binary()
    return pa.large_list(kind.value_type)


def _needs_change(kind: pa.DataType) -> bool:
    t = pa.types
    if t.is_list(kind) or t.is_large_list(kind):
        return _needs_change(kind.value_type)
    return bool(
        isinstance(kind, pa.BaseExtensionType)
        or t.is_dictionary(kind)
        or t.is_fixed_size_binary(kind)
        or t.is_fixed_size_list(kind)
        or _is_view(kind)
    )


def _fixed_lists(array: pa.FixedSizeListArray) -> pa.Array:
    """Convert lists of a fixed length to lists with offsets; nulls become empty, as Spark's are."""
    width = array.type.list_size
    nulls = _nulls(array)
    lengths = np.full(len(array), width, np.int64)
    if nulls is not None:
        lengths[nulls] = 0
        values = array.flatten()  # leaves out elements below nulls
    else:
        values = array.values.slice(array.offset * width, len(array) * width)
    return _lists(plain(values), lengths, nulls)


def _fixed_bytes(array: pa.FixedSizeBinaryArray) -> pa.Array:
    """Convert values of a fixed number of bytes to values with offsets. pyarrow 14 crashes when it casts a part of such an array."""
    width, rows = array.type.byte_width, len(array)
    offsets = np.arange(rows + 1, dtype=np.int64) * width
    is_small = offsets[-1] < 2**31
    data = array.buffers()[1]
    return pa.Array.from_buffers(
        pa.binary() if is_small else pa.large_binary(),
        rows,
        [
            _validity(_nulls(array)),
            pa.py_buffer(offsets.astype(np.int32 if is_small else np.int64)),
            data.slice(array.offset * width, rows * width) if data is not None else None,
        ],
    )


def _order(kind: pa.DataType) -> tuple[int, ...] | None:
    """Return the stored axis of each axis of a fixed-shape tensor; None if they are stored in their order."""
    order = tuple(getattr(kind, "permutation", None) or ())
    return None if order == tuple(range(len(order))) else order


def _tensor(
    array: pa.ExtensionArray, shape: Sequence[int], order: tuple[int, ...] | None
) -> pa.Array:
    """Convert Arrow's fixed-shape tensors to nested lists, and any other extension to its storage."""
    lists = plain(array.storage)
    if len(shape) < 2:
        return lists
    inner = lists.flatten()
    if order is not None:
        stored = np.arange(len(inner)).reshape(-1, *shape)
        axes = (0, *(axis + 1 for axis in order))
        inner = inner.take(pa.array(stored.transpose(axes).reshape(-1)))
        shape = tuple(shape[axis] for axis in order)
    for width in reversed(tuple(shape)[1:]):
        inner = _lists(inner, np.full(len(inner) // width, width, np.int64), None)
    lengths = np.diff(lists.offsets.to_numpy()) // max(1, int(np.prod(tuple(shape)[1:])))
    return _lists(inner, lengths, _nulls(lists))


def _nulls(array: pa.Array) -> Mask | None:
    """Return a mask (rows,) of nulls; None if there are none."""
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def _lists(values: pa.Array, lengths: npt.NDArray[np.int64], nulls: Mask | None) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    is_small = offsets[-1] < 2**31
    kind = (pa.list_ if is_small else pa.large_list)(values.type)
    data = pa.py_buffer(offsets.astype(np.int32 if is_small else np.int64))
    return pa.Array.from_buffers(
        kind, len(lengths), [_validity(nulls), data], -1 if nulls is not None else 0, 0, [values]
    )


def _validity(nulls: Mask | None) -> pa.Buffer | None:
    """Return Arrow's bits of the rows that are not null; None if all are."""
    return None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
