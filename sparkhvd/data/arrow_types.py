"""Convert Arrow types never sent by Spark, and their arrays, to Spark's types and forms.

External Parquet has fixed-size lists, dictionaries, tensors and unsigned numbers; `plain` turns their arrays
into the forms that `column_to_numpy` reads.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Field, SparkType, spark_type_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


Mask = npt.NDArray[np.bool_]

# Arguments of `ParquetFile` that verify page checksums; missing in pyarrow 14.
_ARGUMENTS = inspect.signature(pq.ParquetFile).parameters
VERIFIED = {n: True for n in ("page_checksum_verification",) if n in _ARGUMENTS}

_VECTOR_FIELDS = {"type", "size", "indices", "values"}  # Spark ML's vectors, as Spark writes them

# (test of an Arrow type, class name of its Spark type, text of its Spark type); the first true test decides.
_PLAIN_TYPES: tuple[tuple[Callable[[pa.DataType], bool] | None, str, str], ...] = (
    (pa.types.is_boolean, "BooleanType", "boolean"),
    (pa.types.is_int8, "ByteType", "tinyint"),
    (lambda k: pa.types.is_int16(k) or pa.types.is_uint8(k), "ShortType", "smallint"),
    (lambda k: pa.types.is_int32(k) or pa.types.is_uint16(k), "IntegerType", "int"),
    # uint64 becomes bigint, too; numbers beyond int64 are detected when the data are read.
    (pa.types.is_integer, "LongType", "bigint"),
    (lambda k: pa.types.is_float16(k) or pa.types.is_float32(k), "FloatType", "float"),
    (pa.types.is_float64, "DoubleType", "double"),
    (lambda k: pa.types.is_string(k) or pa.types.is_large_string(k), "StringType", "string"),
    (lambda k: _is(k, "string_view"), "StringType", "string"),
    (lambda k: pa.types.is_binary(k) or pa.types.is_large_binary(k), "BinaryType", "binary"),
    (lambda k: _is(k, "binary_view"), "BinaryType", "binary"),
    (pa.types.is_fixed_size_binary, "BinaryType", "binary"),
    (pa.types.is_date, "DateType", "date"),
    (pa.types.is_temporal, "TimestampType", "timestamp"),
    (None, "NullType", "void"),
)


def spark_type(kind: pa.DataType) -> SparkType:
    """Convert an Arrow type to a Spark type, without pyspark."""
    t = pa.types
    if t.is_dictionary(kind):
        return spark_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        nested = spark_type(kind.storage_type)
        shape = getattr(kind, "shape", None) or ()
        for _ in shape[1:]:
            nested = _array_type(nested)
        return nested
    if _is_any_list(kind):
        return _array_type(spark_type(kind.value_type))
    if t.is_decimal(kind):
        text = f"decimal({min(kind.precision, 38)},{min(kind.scale, 38)})"
        return spark_type_of("DecimalType", text)
    if t.is_struct(kind):
        parts = [kind.field(i) for i in range(kind.num_fields)]
        if {part.name for part in parts} == _VECTOR_FIELDS:
            return spark_type_of("VectorUDT", "vector")
        fields = tuple(Field(part.name, spark_type(part.type)) for part in parts)
        inside = ",".join(f"{each.name}:{each.dataType.simpleString()}" for each in fields)
        return spark_type_of("StructType", f"struct<{inside}>", fields=fields)
    if t.is_map(kind):
        key, value = spark_type(kind.key_type), spark_type(kind.item_type)
        text = f"map<{key.simpleString()},{value.simpleString()}>"
        return spark_type_of("MapType", text, keyType=key, valueType=value)
    return next(
        spark_type_of(name, text) for test, name, text in _PLAIN_TYPES if test is None or test(kind)
    )


def _array_type(element: SparkType) -> SparkType:
    return spark_type_of("ArrayType", f"array<{element.simpleString()}>", elementType=element)


def num_leaves(kind: pa.DataType) -> int:
    """Count the Parquet columns of a top-level column of this type."""
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
    """Convert an array to Spark's forms: lists with offsets, plain values, bytes with offsets."""
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
    """Whether the type has this name. A name unknown to this pyarrow gives False."""
    test = getattr(pa.types, f"is_{name}", None)
    return test is not None and bool(test(kind))


def _is_view(kind: pa.DataType) -> bool:
    """Whether the type is a view: a layout with scattered values, used by libraries like polars."""
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
    """Convert fixed-size lists to lists with offsets. Nulls become empty, as in Spark."""
    width = array.type.list_size
    nulls = _nulls(array)
    lengths = np.full(len(array), width, np.int64)
    if nulls is not None:
        lengths[nulls] = 0
        values = array.flatten()  # omits the elements of null lists
    else:
        values = array.values.slice(array.offset * width, len(array) * width)
    return _lists(plain(values), lengths, nulls)


def _fixed_bytes(array: pa.FixedSizeBinaryArray) -> pa.Array:
    """Convert fixed-size binary values to values with offsets.

    A cast would crash pyarrow 14 for slices.
    """
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
    """Find the stored axis of each axis of a fixed-shape tensor, or None if they are in order."""
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
    """Make the mask (rows,) of the nulls, or None without nulls."""
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
    """Make Arrow's validity bits, or None if no row is null."""
    return None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))


# ----------------------------------------------------------------------------------------------------
# View the memory of Arrow arrays as numpy arrays, and the reverse.
# No Python code runs per row. `pa.array` and `Array.to_numpy` import pandas, 0.3 s in every Python worker, and
# pyarrow.compute takes another 0.1 s. These functions use the buffers instead; only bad data import pandas and compute.

Array = npt.NDArray[Any]


def numpy_to_array(values: Array) -> pa.Array:
    """Wrap a flat numpy array of numbers as an Arrow array with the same memory."""
    kind = pa.from_numpy_dtype(values.dtype)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def nested(values: Array) -> pa.Array:
    """Convert an array (rows, ...) of numbers or booleans to Arrow: numbers, or nested lists of one shape."""
    array = pa.array(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        rows = math.prod(values.shape[:axis])
        array = _lists(array, np.full(rows, values.shape[axis], np.int64), None)
    return array


def text_to_array(text: str) -> pa.Array:
    """Make an array of one string."""
    data = text.encode()
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])


def numbers(array: pa.Array) -> Array:
    """View an Arrow array of numbers or booleans as numpy. Null entries are undefined."""
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


# Doubles represent whole numbers up to this limit exactly, and powers of ten up to this exponent.
_EXACT_INTEGERS = 1 << 53
_MOST_EXACT_POWER = 22


def _without_decimals(array: pa.Array) -> pa.Array:
    """Convert decimals to int64 if all are whole and fit, else to the nearest doubles.

    Other arrays stay unchanged.
    """
    kind = array.type
    if not pa.types.is_decimal(kind):
        return array
    if 0 <= kind.scale <= _MOST_EXACT_POWER and kind.bit_width == 128 and len(array):
        validity, data = array.buffers()
        halves = np.frombuffer(data, "<i8", 2 * len(array), 16 * array.offset).reshape(-1, 2)
        digits = halves[:, 0]
        fits = halves[:, 1] == digits >> 63
        if kind.scale:  # a larger number would be rounded before the division and again by it
            fits &= (digits >= -_EXACT_INTEGERS) & (digits <= _EXACT_INTEGERS)
        if array.null_count:  # the number stored for a null is undefined
            fits |= numbers(array.is_null())
        if fits.all():
            # The validity bits stay in place, so the new values start at the same offset.
            values = np.zeros(array.offset + len(array), np.float64 if kind.scale else np.int64)
            values[array.offset :] = digits / 10.0**kind.scale if kind.scale else digits
            buffers = [validity, pa.py_buffer(values)]
            made = pa.float64() if kind.scale else pa.int64()
            return pa.Array.from_buffers(made, len(array), buffers, array.null_count, array.offset)
    # pyarrow's own conversion is off by the last bit for one number in two hundred.
    return array.cast(pa.string()).cast(pa.float64())


def is_list(kind: pa.DataType) -> bool:
    """Whether rows are lists with 32-bit or 64-bit offsets. Views and fixed-size lists are not."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def flattened(lists: pa.ListArray) -> tuple[Array, pa.Array]:
    """Split lists into row lengths and all elements. Null lists must be empty, as in Spark."""
    if not len(lists):
        return np.empty(0, np.int64), lists.values.slice(0, 0)
    offsets = numbers(lists.offsets)
    return np.diff(offsets), lists.values.slice(offsets[0], offsets[-1] - offsets[0])


def byte_rows(array: pa.Array) -> Ragged:
    """View an Arrow array of binary or string values as rows of bytes. Text is UTF-8."""
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
    """Replace nulls by a number, in a wider type if the array's own cannot hold it.

    Args:
        array: numbers or booleans.
        value: a number that the stored dtype can hold, or NaN.
        dtype: the stored dtype.
    """
    if pa.types.is_boolean(array.type):
        if math.isnan(value):
            return array.cast(pa.float32()).fill_null(value)
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
        except pa.ArrowInvalid:
            # Convert to double below, so that numbers beyond int64 are counted as invalid.
            pass
    if array.type == pa.float16():  # older pyarrows do not cast it
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        return pa.array(numbers(array).astype(np.float64), mask=nulls)
    return array.cast(pa.float64(), safe=False)


def holds(dtype: np.dtype[Any], value: float) -> bool:
    """Whether an integer dtype holds a number exactly, or a floating dtype has it in its range (with NaN, infinity)."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(
            math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
        )
    return bool(not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max))


# ----------------------------------------------------------------------------------------------------
# Send each column of ML vectors from Spark to a Python worker as four columns, because one struct column is slow.
# A vector is struct<type, size, indices, values>, and a dense vector has null indices. While Spark (4.1 and later)
# writes an Arrow batch, it computes its size after every row, and each time walks over the nulls at a list column's
# end: the work is quadratic in the rows. A million dense vectors of 32 took 12 s of the JVM's CPU to arrive; with an
# empty list in place of the null, 2 s. So the parts are sent as separate columns and joined in the worker without
# copying.

PARTS = ("type", "size", "indices", "values")
_DENSE = 1


def vector_columns(schema: StructType) -> tuple[bool, ...]:
    """For each column of a Spark schema, whether it has ML vectors."""
    return tuple(type(field.dataType).__name__ == "VectorUDT" for field in schema.fields)


# A name that Spark finds without quotes.
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def plain_names(names: Sequence[str], is_vector: Sequence[bool]) -> list[str]:
    """Choose names of a DataFrame's columns that Spark finds without quotes, and that `split_vectors` can extend.

    They are the given names if these are plain and unique and there are no vectors, because a rename of 10,000 columns takes
    seconds. Otherwise they are c0, c1, and so on.
    """
    is_unique = len({name.lower() for name in names}) == len(names)
    if is_unique and not any(is_vector) and all(map(_PLAIN_NAME.fullmatch, names)):
        return [*names]
    return [f"c{i}" for i in range(len(names))]


def split_vectors(df: DataFrame, is_vector: Sequence[bool]) -> DataFrame:
    """Replace every vector column by four columns. Other columns are unchanged.

    Args:
        df: the DataFrame, classic or Connect; its names are plain and unique.
        is_vector: `vector_columns` of its schema.
    """
    if not any(is_vector):
        return df
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    columns = []
    for name, splits in zip(df.columns, is_vector, strict=True):
        if not splits:
            columns.append(F.col(name))
            continue
        vector = F.unwrap_udt(F.col(name))
        parts = {part: vector.getField(part) for part in PARTS}
        parts["indices"] = F.coalesce(parts["indices"], F.array().cast("array<int>"))
        columns += [column.alias(f"{name}_{part}") for part, column in parts.items()]
    return df.select(*columns)


def join_vectors(batch: pa.RecordBatch, is_vector: Sequence[bool]) -> pa.RecordBatch:
    """Join the columns of `split_vectors` to Spark's structs again.

    The result's columns are named c0, c1, and so on.
    """
    if not any(is_vector):
        return batch
    arrays = iter(batch.columns)
    joined = [
        _vector(*(next(arrays) for _ in PARTS)) if splits else next(arrays) for splits in is_vector
    ]
    return pa.RecordBatch.from_arrays(joined, names=[f"c{i}" for i in range(len(joined))])


def _vector(kind: pa.Array, size: pa.Array, indices: pa.Array, values: pa.Array) -> pa.Array:
    null = kind.is_null() if kind.null_count else None  # the whole vector is null
    if size.null_count == len(size):  # all vectors are dense or null
        indices = pa.nulls(len(indices), indices.type)
    elif size.null_count:
        import pyarrow.compute as pc

        indices = pc.if_else(size.is_null(), pa.scalar(None, indices.type), indices)
    return pa.StructArray.from_arrays([kind, size, indices, values], names=list(PARTS), mask=null)
