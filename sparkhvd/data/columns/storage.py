"""Storage of a column by its Spark type: the kind of its rows, their numpy type and the tensor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkhvd.data.columns.schema import FLOATS, RAW_TYPES, Column, stored_dtype
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField

__all__ = ["NUMERIC_TYPES", "SUPPORTED", "raw_column", "tensor_column"]

# Spark type -> the numpy type of its values. The narrow integers widen when stored.
NUMERIC_TYPES: Mapping[str, str] = {
    "BooleanType": "bool",
    "ByteType": "int8",
    "ShortType": "int16",
    "IntegerType": "int32",
    "LongType": "int64",
    "FloatType": "float32",
    "DoubleType": "float64",
    "DecimalType": "float64",
}


SUPPORTED = (
    "boolean, tinyint, smallint, int, bigint, float, double, decimal, arrays of these (also nested), Spark ML vectors, "
    "and binary and string with a decoder"
)


def tensor_column(
    field: StructField,
    role: str,
    floating: tuple[str, str],
    override: str | None,
    *,
    keeps_type: bool = False,
) -> Column:
    """Decide the storage of a column of numbers.

    Args:
        field: of the source.
        role: of the column, for messages.
        floating: types of floats in arrays and vectors, and in scalars.
        override: the user's type, or None.
        keeps_type: store numbers in Spark's type, unless the user chose one; a decimal as a double.

    Raises:
        InvalidArgumentError: its type cannot become a tensor.
    """
    name = field.name
    kind, element, source = _classify(field.dataType)
    if element is None:
        raise InvalidArgumentError(
            f"{role} names column {name!r} of type {source}, which cannot become a tensor. "
            f"Supported are: {SUPPORTED}. {_remedy(source, name)}"
        )
    if override is not None:
        tensor = override
    elif element in FLOATS:
        tensor = floating[kind == "scalar"]
    else:
        tensor = "bool" if element == "bool" else "int64"
    return Column(
        name=name,
        kind=kind,
        dtype=element if keeps_type and override is None else stored_dtype(tensor),
        shape=() if kind == "scalar" else None,
        source=source,
        tensor_dtype=tensor,
        is_explicit=override is not None,
    )


def raw_column(
    field: StructField, default: str, override: str | None, *, has_decoder: bool
) -> Column:
    """Decide the storage of a column that a decoder or a collate function gets row by row.

    Args:
        field: of the source.
        default: dtype of floats.
        override: the user's type, or None.
        has_decoder: a decoder gets the rows, else a collate function.

    Raises:
        InvalidArgumentError: its type is neither bytes nor text nor an array of numbers.
    """
    name = field.name
    raw = RAW_TYPES.get(type(field.dataType).__name__)
    kind, element, source = _classify(field.dataType)
    if raw is None and (kind != "array" or element is None):
        param = "decoders" if has_decoder else "collate_fn"
        raise InvalidArgumentError(
            f"{param} names column {name!r} of type {source}. It takes columns of binary, string and arrays of numbers."
        )
    if raw is not None:
        dtype, tensor = "uint8", override or default
    else:
        usual = default if element in FLOATS else "bool" if element == "bool" else "int64"
        dtype = stored_dtype(override or usual)
        tensor = override or (default if has_decoder else usual)
    return Column(
        name=name,
        kind=raw or "ragged",
        dtype=dtype,
        shape=None,
        source=source,
        tensor_dtype=tensor,
        is_explicit=override is not None,
        has_decoder=has_decoder,
    )


def _classify(data_type: DataType) -> tuple[str, str | None, str]:
    """Return kind, numpy type of the elements or None, and Spark's name of a Spark type."""
    name = type(data_type).__name__
    if name == "VectorUDT":
        return "vector", "float64", "vector"
    if name == "ArrayType":
        inner: Any = data_type
        while type(inner).__name__ == "ArrayType":
            inner = inner.elementType
        return "array", NUMERIC_TYPES.get(type(inner).__name__), data_type.simpleString()
    return "scalar", NUMERIC_TYPES.get(name), data_type.simpleString()


def _remedy(source: str, name: str) -> str:
    if source.startswith(("string", "varchar", "char")):
        return (
            f"Give decoders={{{name!r}: function of a str, or a dict from strings to numbers}}, use StringIndexer, or cast "
            "it if it holds digits."
        )
    if source == "binary":
        return f"Give decoders={{{name!r}: function from bytes to a number or numpy array}}."
    if source.startswith(("timestamp", "date")):
        return "Turn it into numbers first, for example with unix_timestamp, or weekday and dayofyear (docs/tabular.md)."
    if source.startswith("array<"):
        return (
            "An array must hold numbers, or arrays of numbers. Of words make numbers before, with CountVectorizer or a lookup table, or "
            "one string with concat_ws, which a decoder splits."
        )
    if source.startswith("struct"):
        return "Select its fields as columns of their own."
    return "Turn it into numbers first."
