"""Columns of a data set: role, type, shape and storage of each.

Types are recognised by name, so that ranks can read a schema without pyspark, and Spark's workers without torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.wire import read_json, rebuild

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType


# pyspark's classes for a DataFrame, or this module's own classes for other sources.
AnySchema: TypeAlias = "StructType | Schema"
AnyField: TypeAlias = "StructField | Field"
AnyType: TypeAlias = "DataType | SparkType"

# Spark types whose values need a user function to become numbers.
RAW_TYPES: Mapping[str, str] = {
    "BinaryType": "binary",
    "StringType": "string",
    "VarcharType": "string",
    "CharType": "string",
}
FIXED_KINDS = ("scalar", "array", "vector")
# A vector of more dimensions is kept sparse unless the user chooses otherwise: 256 KiB per row as dense float32.
DENSE_WIDTH = 65_536
FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
TENSOR_DTYPES = (*FLOATS, *INTEGERS, "bool")


@dataclass(frozen=True)
class Column:
    """Column of a data set, with its types in Spark, in the files and as a tensor.

    Attributes:
        name: as the user typed it.
        kind: "scalar", "array" or "vector" if all rows have one shape; "sparse" (a vector of few values), "ragged" (an
            array whose length differs), "binary" or "string" for rows of variable size.
        dtype: numpy name of a stored element: "float32", "int64", "uint8", ...; with a `transformation_fn`, which
            receives the DataFrame's numbers, the name of the DataFrame's type.
        shape: shape of one row's value: `()` for scalars, (dimensions,) for sparse vectors, -1 first if rows differ in
            length. None until the column is materialized, except for scalars.
        source: Spark's name of the type: "double", "array<float>", "vector", ...
        tensor_dtype: torch name of the trainer's tensor; differs from `dtype` for bfloat16 and bool, and with a
            `transformation_fn`.
        is_explicit: the user chose the dtype (`feature_dtypes`, `label_dtypes`).
        has_decoder: a user function converts each stored value to a number or array.
        is_collated: a user function converts the rows of a batch to an argument of the model.
        decoded: shape of one row's value after the decoder; None until data have been read.
        is_sparse: whether a vector is kept sparse; None lets its width decide.
        invalid: policy for rows that are null or hold a null, NaN, infinity or a number that the tensor cannot
            hold: ("error",), ("skip",), ("keep",) (NaN and infinity unchanged, a null as NaN) or ("fill", value).
        cast_to: torch name of the floating type to which these integers are cast when an argument joins them with
            floats; "" if they stay integers.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    source: str = ""
    tensor_dtype: str = ""
    is_explicit: bool = False
    has_decoder: bool = False
    is_collated: bool = False
    decoded: tuple[int, ...] | None = None
    is_sparse: bool | None = None
    invalid: tuple[Any, ...] = ("error",)
    cast_to: str = ""

    @property
    def number_type(self) -> str:
        """Final type of the numbers, by name: the stored type if a user function gets them, else the tensor's."""
        is_own = self.has_decoder or self.keeps_type
        return self.dtype if is_own else self.cast_to or self.tensor_dtype

    @property
    def holds_nan(self) -> bool:
        """True if NaN is possible both in the files and in `number_type`."""
        return self.dtype in FLOATS and self.number_type in FLOATS

    @property
    def keeps_type(self) -> bool:
        """True if numbers are stored in the source's type for a `transformation_fn`, not in the tensor's type."""
        is_raw = self.has_decoder or self.kind in RAW_TYPES.values()
        return not is_raw and self.dtype != stored_dtype(self.tensor_dtype)

    def for_model(self) -> Column:
        """Return the column as if stored without a `transformation_fn`."""
        return replace(self, dtype=stored_dtype(self.tensor_dtype)) if self.keeps_type else self

    @property
    def is_fixed(self) -> bool:
        """True if all rows have equal size in the packed files."""
        return self.kind in FIXED_KINDS

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """Shape of one row as the model's input, after the decoder, or None if unknown, or if a batch is collated."""
        if self.is_collated:
            return None
        return self.decoded if self.has_decoder else self.shape

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """Type of a row's value for the trainer."""
        return np.dtype(stored_dtype(self.tensor_dtype) if self.has_decoder else self.dtype)

    @property
    def is_floating(self) -> bool:
        """True if the tensor's values are floating point."""
        return self.tensor_dtype in FLOATS

    @property
    def has_range(self) -> bool:
        """True if values are stored as integers and reach the trainer unchanged."""
        return (
            self.dtype in INTEGERS
            and self.tensor_dtype != "bool"
            and not (self.has_decoder or self.kind in RAW_TYPES.values() or self.kind == "sparse")
        )

    @property
    def num_elements(self) -> int:
        """Elements per row, known only after materialization."""
        if self.shape is None:
            raise InvalidArgumentError(
                f"Column {self.name!r}: the number of elements per row is known only after the data "
                "have been materialized. Use the manifest's schema."
            )
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes per row in the packed files, or bytes of a variable row's end position."""
        return self.num_elements * np.dtype(self.dtype).itemsize if self.is_fixed else 8

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one entry of a ragged row."""
        return (self.shape or ())[1:] if self.kind == "ragged" else ()

    def keeps_sparse(self, width: int) -> bool:
        """Whether vectors of this width are stored sparse."""
        if self.kind == "sparse":
            return True
        if self.kind != "vector":
            return False
        return width > DENSE_WIDTH if self.is_sparse is None else self.is_sparse

    def with_shape(self, shape: tuple[int, ...]) -> Column:
        """Set the shape found in the data. A wide vector becomes sparse."""
        if self.kind == "vector" and self.keeps_sparse(math.prod(shape)):
            return replace(self, kind="sparse", shape=shape)
        return replace(self, shape=shape)


@dataclass(frozen=True)
class DataSchema:
    """Columns of a fit by role. A feature column may also be a label."""

    features: tuple[Column, ...]
    labels: tuple[Column, ...]
    sample_weight: Column | None = None
    validation: Column | None = None
    group: Column | None = None

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what is cached

    @functools.cached_property
    def columns(self) -> tuple[Column, ...]:
        """Every stored column: features, labels, sample weight, validation, group."""
        single = (self.sample_weight, self.validation, self.group)
        extra = [c for c in single if c is not None]
        stored = {c.name for c in self.features}
        labels = [c for c in self.labels if c.name not in stored]
        return (*self.features, *labels, *extra)

    @functools.cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in reversed(self.columns)}

    @property
    def row_bytes(self) -> int:
        """Bytes per row in the packed files."""
        return sum(c.row_bytes for c in self.columns)

    def column(self, name: str) -> Column:
        if (column := self._by_name.get(name)) is not None:
            return column
        raise InvalidArgumentError(
            f"Column {name!r} is not part of the data, which have: "
            f"{listed(repr(c.name) for c in self.columns)}."
        )

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> DataSchema:
        """Set the shapes found in the data."""

        def shaped(column: Column) -> Column:
            return column.with_shape(tuple(shapes[column.name]))

        return DataSchema(
            features=tuple(shaped(c) for c in self.features),
            labels=tuple(shaped(c) for c in self.labels),
            sample_weight=shaped(self.sample_weight) if self.sample_weight else None,
            validation=shaped(self.validation) if self.validation else None,
            group=self.group,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert the schema to plain values for `wire.rebuild`."""

        def plain(column: Column | None) -> dict[str, Any] | None:
            return None if column is None else dict(vars(column))

        return {
            "features": [plain(column) for column in self.features],
            "labels": [plain(column) for column in self.labels],
            "sample_weight": plain(self.sample_weight),
            "validation": plain(self.validation),
            # Without groups the entry is absent, as in files of versions before groups existed.
            **({} if self.group is None else {"group": plain(self.group)}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> DataSchema:
        """Rebuild the schema from `to_json`. Any other text raises ValueError."""
        return rebuild(cls, read_json(text))


def dtype_name(dtype: object) -> str:
    """Torch name of a dtype given as text, torch.dtype or numpy dtype: "float32", "bfloat16", ...

    Raises:
        InvalidArgumentError: a tensor of numbers cannot have it.
    """
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
    elif str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name  # type: ignore[call-overload]  # raises TypeError for other objects
        except TypeError:
            name = str(dtype)
    name = {"float": "float32", "double": "float64", "half": "float16", "long": "int64"}.get(
        name, name
    )
    if name not in TENSOR_DTYPES:
        raise InvalidArgumentError(
            f"{dtype!r} is not a dtype of this package. Give one of: {', '.join(TENSOR_DTYPES)}."
        )
    return name


def stored_dtype(tensor_dtype: str) -> str:
    """Choose the numpy type to store values of a torch type without loss."""
    return {"bfloat16": "float32", "bool": "uint8"}.get(tensor_dtype, tensor_dtype)


# ----------------------------------------------------------------------------------------------------
# The Spark type of a column decides its storage: kind of the rows, numpy type, and the tensor's type.

# Spark type -> numpy type of its values. Narrow integers are widened when stored.
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
    field: AnyField,
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
        InvalidArgumentError: the column's type cannot become a tensor.
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


def raw_column(field: AnyField, default: str, override: str | None, *, has_decoder: bool) -> Column:
    """Decide the storage of a column for a decoder or a collate function.

    Args:
        field: of the source.
        default: dtype of floats.
        override: the user's type, or None.
        has_decoder: a decoder receives the rows, else a collate function.

    Raises:
        InvalidArgumentError: the column's type is neither bytes nor text nor an array of numbers.
    """
    name = field.name
    raw = RAW_TYPES.get(type(field.dataType).__name__)
    kind, element, source = _classify(field.dataType)
    if raw is None and (kind != "array" or element is None):
        param = "decoders" if has_decoder else "collate_fn"
        raise InvalidArgumentError(
            f"{param} names column {name!r} of type {source}. It takes only binary columns, string columns and arrays of numbers."
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


def _classify(data_type: AnyType) -> tuple[str, str | None, str]:
    """Classify a Spark type: kind, numpy type of the elements (or None), and Spark's name."""
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
            "An array must hold numbers, or arrays of numbers. Convert words to numbers first, with CountVectorizer or a lookup table, "
            "or join them to one string with concat_ws and split it in a decoder."
        )
    if source.startswith("struct"):
        return "Select its fields as columns of their own."
    return "Turn it into numbers first."


# ----------------------------------------------------------------------------------------------------
# Shapes of one row, as given in Params.


def checked_shape(param: str, given: Sequence[int], column: Column) -> tuple[int, ...]:
    """Check the row shape in a Param for a column, and drop its leading -1 for the batch.

    Raises:
        InvalidArgumentError: the value is not a shape, or has another number of elements than the column.
    """
    shape = row_shape_of(param, given)
    known = math.prod(d for d in shape if d != -1)
    if column.kind == "sparse":
        raise InvalidArgumentError(
            f"Column {column.name!r} is sparse, so {param} cannot set its shape. Leave {param} out and name the column in inputs."
        )
    if column.row_shape is not None:
        elements = math.prod(column.row_shape)
        fits = elements == known if -1 not in shape else known > 0 and elements % known == 0
        if not fits:
            raise InvalidArgumentError(
                f"{param} gives {list(given)} for column {column.name!r}, which has {elements} "
                f"element{'s' * (elements != 1)} per row. Give a shape of {elements} elements, for example "
                f"[-1, {elements}]."
            )
    return shape


def row_shape_of(param: str, given: object) -> tuple[int, ...]:
    """Check the shape of rows in a Param, and drop a leading -1 for the batch.

    Raises:
        InvalidArgumentError: the value is not a shape.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    shape: tuple[int, ...] = tuple(given) if isinstance(given, Sequence) else ()
    if not is_list or not all(isinstance(d, int) and (d == -1 or d > 0) for d in shape):
        raise InvalidArgumentError(
            f"{param} holds {given!r}. A shape is a list of positive numbers, with -1 for the batch: "
            "[-1, 1, 28, 28]."
        )
    row = shape[1:] if shape and shape[0] == -1 else shape
    if row.count(-1) > 1:
        raise InvalidArgumentError(
            f"{param} holds {list(shape)}. Besides the leading -1 for the batch, a shape may have at most one -1."
        )
    return row


@dataclass(frozen=True)
class Shaped:
    """Decoder that reshapes the arrays of a user's decoder for the model.

    Attributes:
        function: the user's decoder.
        shape: shape of one row.
    """

    function: Callable[..., object]
    shape: tuple[int, ...]

    def __call__(self, value: object) -> object:
        """Decode a value, and reshape the result."""
        array = np.asarray(self.function(value))
        return array.reshape(self.shape) if array.size == math.prod(self.shape) else array


# ----------------------------------------------------------------------------------------------------
# Schema of columns that are not from a DataFrame, for a process without pyspark.


class SparkType:
    """Stand-in for a Spark type without pyspark, recognised by pyspark's class name."""

    def __init__(self, text: str, **parts: Any) -> None:
        self._text = text
        vars(self).update(parts)

    def simpleString(self) -> str:  # noqa: N802 - pyspark's names, here and below
        return self._text

    def typeName(self) -> str:  # noqa: N802
        """Return the name of the type without its parts, such as "array"."""
        return type(self).__name__.removesuffix("Type").lower()


@functools.cache
def _class_of(name: str) -> type[SparkType]:
    return type(name, (SparkType,), {})


def spark_type_of(name: str, text: str, **parts: Any) -> SparkType:
    """Make a Spark type from the name of pyspark's class.

    Args:
        name: of pyspark's class.
        text: as its `simpleString` returns it.
        parts: attributes of pyspark's type: `elementType` of an array, `fields` of a struct.
    """
    return _class_of(name)(text, **parts)


@dataclass(frozen=True)
class Field:
    """Column of a `Schema`, with the attributes of pyspark's `StructField`."""

    name: str
    dataType: SparkType  # noqa: N815
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Schema:
    """Schema of another source than a DataFrame, with the methods of pyspark's `StructType`."""

    fields: tuple[Field, ...]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.fields]

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        return next(each for each in self.fields if each.name == name)
