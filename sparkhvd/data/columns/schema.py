"""Which DataFrame columns take part, how each is stored, and every check of them on the driver.

Nothing here starts a Spark job, and nothing imports pyspark or torch: types are recognised by their names,
so ranks can read a schema without either.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "FLOATS",
    "RAW_TYPES",
    "Column",
    "DataSchema",
    "check_schema",
    "dtype_name",
    "stored_dtype",
]

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
# Spark types whose values only a function of the user's can turn into numbers.
RAW_TYPES: Mapping[str, str] = {
    "BinaryType": "binary",
    "StringType": "string",
    "VarcharType": "string",
    "CharType": "string",
}
FIXED_KINDS = ("scalar", "array", "vector")
# A vector of more dimensions is kept sparse unless the user says otherwise: 256 KiB per row as dense float32.
DENSE_WIDTH = 65_536
FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
TENSOR_DTYPES = (*FLOATS, *INTEGERS, "bool")


@dataclass(frozen=True)
class Column:
    """One column of the DataFrame and how the packed files hold it.

    Attributes:
        name: as the user typed it.
        kind: "scalar", "array" or "vector" if all rows have one shape; "sparse" (a vector of few values), "ragged" (an
            array whose length differs), "binary" or "string" if they take as many bytes as they need.
        dtype: numpy name of a stored element: "float32", "int64", "uint8", ...
        shape: shape of one row's value; `()` for scalars, (dimensions,) for sparse vectors, -1 in front where rows
            differ; None for all but scalars until materialized.
        source: Spark's name of the type: "double", "array<float>", "vector", ...
        tensor_dtype: torch name of the tensor that the trainer sees; differs from `dtype` for bfloat16 and bool.
        is_explicit: the user chose the dtype (`feature_dtypes`, `label_dtypes`).
        has_decoder: a function of the user's turns each stored value into a number or array.
        is_collated: a function of the user's turns the rows of a batch into what the model gets.
        decoded: shape of one row's value after the decoder; None until data have been read.
        is_sparse: whether a vector is kept sparse; None lets its width decide.
        invalid: what to do with rows that are null or hold a null, NaN, infinity or a number that the tensor cannot
            hold: ("error",), ("skip",) or ("fill", value).
        cast_to: torch name of the floating type in which a tensor holds these integers beside floats; empty if they
            stay integers.
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
        """Torch name of the type that its numbers must fit: the tensor's, or the stored one of what a decoder gets."""
        return self.dtype if self.has_decoder else self.cast_to or self.tensor_dtype

    @property
    def is_fixed(self) -> bool:
        """Whether every row takes the same number of bytes in the packed files."""
        return self.kind in FIXED_KINDS

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """Shape of one row as the model's input, after the decoder; None if not known, or if a batch is collated."""
        if self.is_collated:
            return None
        return self.decoded if self.has_decoder else self.shape

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """Type of a row's value as the trainer gets it."""
        return np.dtype(stored_dtype(self.tensor_dtype) if self.has_decoder else self.dtype)

    @property
    def is_floating(self) -> bool:
        """Whether the values are floating point (as a tensor)."""
        return self.tensor_dtype in FLOATS

    @property
    def num_elements(self) -> int:
        """Elements per row; only known once materialized."""
        if self.shape is None:
            raise InvalidArgumentError(
                f"Column {self.name!r}: the number of elements per row is known only after the data "
                "have been materialized. Use the manifest's schema."
            )
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in the packed files; where rows differ, bytes of where it ends."""
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
        """This column with the shape that the data turned out to have; a wide vector becomes sparse."""
        if self.kind == "vector" and self.keeps_sparse(math.prod(shape)):
            return replace(self, kind="sparse", shape=shape)
        return replace(self, shape=shape)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Column:
        """The column whose fields `dataclasses.asdict` gave, also after a way through JSON."""

        def whole(value: Any) -> Any:
            return None if value is None else tuple(value)

        tuples = {n: whole(fields[n]) for n in ("shape", "decoded", "invalid") if n in fields}
        return cls(**{**fields, **tuples})


@dataclass(frozen=True)
class DataSchema:
    """The columns of a fit by their roles; every column has exactly one."""

    features: tuple[Column, ...]
    labels: tuple[Column, ...]
    sample_weight: Column | None = None
    validation: Column | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """Every stored column: features, labels, sample weight, validation."""
        extra = [c for c in (self.sample_weight, self.validation) if c is not None]
        return (*self.features, *self.labels, *extra)

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in the packed files."""
        return sum(c.row_bytes for c in self.columns)

    def column(self, name: str) -> Column:
        """The column of that name."""
        for column in self.columns:
            if column.name == name:
                return column
        raise InvalidArgumentError(
            f"Column {name!r} is not part of the data, which have: "
            f"{', '.join(repr(c.name) for c in self.columns)}."
        )

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> DataSchema:
        """This schema with the shapes found in the data."""

        def shaped(column: Column) -> Column:
            return column.with_shape(tuple(shapes[column.name]))

        return DataSchema(
            features=tuple(shaped(c) for c in self.features),
            labels=tuple(shaped(c) for c in self.labels),
            sample_weight=shaped(self.sample_weight) if self.sample_weight else None,
            validation=shaped(self.validation) if self.validation else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which `from_dict` rebuilds the schema."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataSchema:
        """The schema that `to_dict` described."""
        column = Column.from_dict
        weight, validation = values["sample_weight"], values["validation"]
        return cls(
            features=tuple(column(c) for c in values["features"]),
            labels=tuple(column(c) for c in values["labels"]),
            sample_weight=column(weight) if weight else None,
            validation=column(validation) if validation else None,
        )

    def to_json(self) -> str:
        """Text from which `from_json` rebuilds the schema."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> DataSchema:
        """The schema that `to_json` wrote."""
        return cls.from_dict(json.loads(text))


def dtype_name(dtype: Any) -> str:
    """The torch name of a dtype given as text, torch.dtype or numpy dtype: "float32", "bfloat16", ...

    Raises:
        InvalidArgumentError: it is none that a tensor of numbers can have.
    """
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
    elif str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name
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
    """The numpy type in which values of a torch type are stored without loss."""
    return {"bfloat16": "float32", "bool": "uint8"}.get(tensor_dtype, tensor_dtype)


def check_schema(
    df_schema: Any,
    *,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weight_col: str | None = None,
    validation: float | str | None = None,
    model_dtype: str = "float32",
    feature_dtypes: Mapping[str, Any] | Sequence[Any] | None = None,
    label_dtypes: Mapping[str, Any] | Sequence[Any] | None = None,
    class_labels: Sequence[str] = (),
    decoders: Collection[str] = (),
    collated: Collection[str] = (),
    sparse_cols: Sequence[str] | None = None,
    handle_invalid: str | Mapping[str, Any] = "error",
    data_name: str = "DataFrame",
) -> DataSchema:
    """Decide how every column is stored, or say what is wrong with it. Runs on the driver, starts no job.

    Floating columns take the dtype of the model's parameters, integers become int64, booleans uint8;
    `feature_dtypes` and `label_dtypes` override that per column (a mapping by name, or one entry per column,
    None for "as usual"). The validation column (boolean or a number, > 0 means validation) is stored as uint8.

    Args:
        df_schema: the DataFrame's `schema` (classic or Connect).
        feature_cols: columns that become inputs of the model.
        label_cols: columns that become labels; may be empty.
        sample_weight_col: one number per row, or None.
        validation: a fraction in [0, 1), the name of a column, or None.
        model_dtype: dtype of the model's parameters, for example "float32".
        feature_dtypes: overrides for feature columns.
        label_dtypes: overrides for label columns.
        class_labels: label columns that hold class indices. Spark ML has these as doubles: a floating scalar becomes
            int64, and materialization refuses numbers that are not whole.
        decoders: columns whose values a function of the user's turns into numbers or arrays.
        collated: columns whose rows a function of the user's turns into a batch.
        sparse_cols: vector features that are kept sparse; None means those of more than `DENSE_WIDTH` dimensions.
        handle_invalid: "error", "skip" (rows with a null or an invalid number), or by column "error", "skip" or a value to fill in.
        data_name: what has the columns, for messages.

    Raises:
        InvalidArgumentError: a column is missing, ambiguous, of a type that cannot become a tensor, or has two
            roles. The message names the column, what was found and what is expected.
    """
    features = _names(feature_cols, "feature_cols")
    labels = _names(label_cols, "label_cols")
    if not features:
        raise InvalidArgumentError(
            "feature_cols is empty. Name at least one column for the model's input."
        )
    by_name = _fields_by_name(df_schema)
    default = dtype_name(model_dtype)
    feature_dtype = _overrides(feature_dtypes, features, "feature_dtypes")
    label_dtype = _overrides(label_dtypes, labels, "label_dtypes")

    given = [*features, *labels, *([sample_weight_col] if sample_weight_col else [])]
    _known("decoders", decoders, [*features, *labels])
    _known("collate_fn", collated, [*features, *labels])
    _known("sparse_cols", sparse_cols or (), features)
    policies = _policies(handle_invalid, given)
    roles: dict[str, str] = {}

    def build(
        name: str, role: str, override: str | None = None, *, only_scalar: bool = False
    ) -> Column:
        if name in roles:
            raise InvalidArgumentError(
                f"Column {name!r} is given as {roles[name]} and as {role}. Every column has one role: "
                f'copy it first, df.withColumn("{name}_2", df["{name}"]), or remove one of the two.'
            )
        roles[name] = role
        floating = "int64" if role.startswith("label_cols") and name in class_labels else default
        field = _field(by_name, name, role, data_name)
        if only_scalar:
            column = _column(field, name, role, (default, floating), override, only_scalar)
        elif name in decoders or name in collated:
            column = _variable(field, name, role, default, override, name in decoders)
            column = replace(column, is_collated=name in collated)
        else:
            column = _column(field, name, role, (default, floating), override, only_scalar)
        if sparse_cols is not None or not role.startswith("feature_cols"):
            column = replace(column, is_sparse=name in (sparse_cols or ()))
            if column.is_sparse and column.kind != "vector":
                raise InvalidArgumentError(
                    f"sparse_cols names column {name!r} of type {column.source}; only Spark ML vectors can be kept sparse."
                )
        invalid = policies.get(name, ("error",))
        if invalid[0] == "fill":
            _check_fill(column, invalid[1])
        return replace(column, invalid=invalid)

    weight = None
    split = None
    columns = tuple(
        build(n, f"feature_cols[{i}]", feature_dtype.get(n)) for i, n in enumerate(features)
    )
    targets = tuple(build(n, f"label_cols[{i}]", label_dtype.get(n)) for i, n in enumerate(labels))
    if sample_weight_col is not None:
        _names([sample_weight_col], "sample_weight_col")
        weight = build(sample_weight_col, "sample_weight_col", default, only_scalar=True)
    if isinstance(validation, str):
        split = build(validation, "validation", only_scalar=True)
        split = replace(split, dtype="uint8", tensor_dtype="bool", is_explicit=False)
    elif validation is not None:
        check_fraction(validation)
    return DataSchema(columns, targets, weight, split)


def _known(param: str, names: Collection[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            raise InvalidArgumentError(
                f"{param} names column {name!r}, which is not among {', '.join(map(repr, columns))}."
            )


def _policies(given: str | Mapping[str, Any], columns: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """By column what happens to nulls and invalid numbers: ("error",), ("skip",) or ("fill", value)."""
    if isinstance(given, str):
        by_name: Mapping[str, Any] = dict.fromkeys(columns, given)
        texts = tuple(by_name.values())
    else:
        _known("handle_invalid", given, columns)
        by_name, texts = given, ()
    policies: dict[str, tuple[Any, ...]] = {}
    for name, value in by_name.items():
        if value in ("error", "skip"):
            policies[name] = (str(value),)
        elif isinstance(value, (bool, int, float)) and not texts:
            policies[name] = ("fill", value)
        else:
            raise InvalidArgumentError(
                f"handle_invalid is {given!r}. Give 'error', 'skip' (leave out rows with a null, NaN, infinity or a number "
                "that the tensor cannot hold), or a dict by column of 'error', 'skip' or a number that takes their place."
            )
    return policies


def _check_fill(column: Column, value: bool | int | float) -> None:
    """Raise InvalidArgumentError unless the number can take the place of nulls in the stored column."""
    where = (
        f"handle_invalid fills column {column.name!r} of type {column.source} with {value!r:.50}"
    )
    if column.kind in ("binary", "string"):
        raise InvalidArgumentError(
            f"{where}. Bytes and strings cannot be filled with a number: give 'skip' or 'error', or df.na.fill before."
        )
    if value != value:
        raise InvalidArgumentError(f"{where}, and NaN is what is to be replaced. Give a number.")
    if not _holds(column, value):
        raise InvalidArgumentError(
            f"{where}, which {column.tensor_dtype} cannot hold. Give another number, or another type with "
            "feature_dtypes or label_dtypes."
        )


def _holds(column: Column, value: bool | int | float) -> bool:
    """Whether the stored type can hold a number that is not NaN."""
    if column.dtype not in FLOATS:
        limits = np.iinfo(column.dtype)
        low, high = (0, 1) if column.tensor_dtype == "bool" else (limits.min, limits.max)
        return low <= value <= high and value == int(value)
    if isinstance(value, float) and math.isinf(value):
        return True
    return abs(value) <= float(np.finfo(column.dtype).max)


def check_fraction(validation: Any) -> None:
    """Raise InvalidArgumentError unless `validation` is a number in [0, 1)."""
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise InvalidArgumentError(
            f"validation is {validation!r}. Give a fraction in [0, 1) or the name of a column."
        )
    if not 0 <= validation < 1:
        raise InvalidArgumentError(
            f"validation is {validation!r}. A fraction must be at least 0 and less than 1, for example 0.1."
        )


def _names(names: Any, param: str) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidArgumentError(
            f"{param} is {names!r}. Give a list of column names, for example [{names!r}]."
            if isinstance(names, str)
            else f"{param} is {names!r}. Give a list of column names."
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(
                f"{param} holds {name!r}. Every entry must be a column's name."
            )
    return list(names)


def _fields_by_name(df_schema: Any) -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for field in df_schema.fields:
        by_name.setdefault(field.name, []).append(field)
    return by_name


def _field(by_name: Mapping[str, list[Any]], name: str, role: str, data_name: str) -> Any:
    found = by_name.get(name)
    if not found:
        close = difflib.get_close_matches(name, by_name, n=3, cutoff=0.6)
        lower = [n for n in by_name if n.lower() == name.lower() and n not in close]
        hint = (
            f" Did you mean {' or '.join(repr(n) for n in (lower + close)[:3])}?"
            if lower + close
            else ""
        )
        outer = name.partition(".")[0]
        if outer != name and any(hasattr(f.dataType, "fields") for f in by_name.get(outer, [])):
            hint = f" {outer!r} is a struct: select its fields first, df.select('*', '{outer}.*'), and name them alone."
        raise InvalidArgumentError(
            f"{role} names column {name!r}, which the {data_name} does not have.{hint} "
            f"Its columns are: {_listing(list(by_name))}."
        )
    if len(found) > 1:
        raise InvalidArgumentError(
            f"{role} names column {name!r}, which the {data_name} has {len(found)} times. "
            "Rename or drop the others first, so that the name is unique."
        )
    return found[0]


def _listing(names: list[str], limit: int = 30) -> str:
    shown = ", ".join(repr(n) for n in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def _column(
    field: Any,
    name: str,
    role: str,
    floating: tuple[str, str],
    override: str | None,
    only_scalar: bool,
) -> Column:
    """`floating`: what floating elements become in arrays and vectors, and in scalars."""
    kind, element, source = _classify(field.dataType)
    if element is None:
        raise InvalidArgumentError(
            f"{role} names column {name!r} of type {source}, which cannot become a tensor. "
            f"Supported are: {SUPPORTED}. {_remedy(source, name)}"
        )
    if only_scalar and kind != "scalar":
        raise InvalidArgumentError(
            f"{role} names column {name!r} of type {source}. It must hold one number per row."
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
        dtype=stored_dtype(tensor),
        shape=() if kind == "scalar" else None,
        source=source,
        tensor_dtype=tensor,
        is_explicit=override is not None,
    )


def _variable(
    field: Any, name: str, role: str, default: str, override: str | None, has_decoder: bool
) -> Column:
    """A column that a decoder or a collate function of the user's gets row by row."""
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


def _classify(data_type: Any) -> tuple[str, str | None, str]:
    """(kind, numpy type of the elements or None, Spark's name) of a Spark type."""
    name = type(data_type).__name__
    if name == "VectorUDT":
        return "vector", "float64", "vector"
    if name == "ArrayType":
        inner = data_type.elementType
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
        return "Turn it into a number first, for example with unix_timestamp."
    if source.startswith("array<"):
        return "An array must hold numbers, or arrays of numbers."
    if source.startswith("struct"):
        return "Select its fields as columns of their own."
    return "Turn it into numbers first."


def _overrides(
    given: Mapping[str, Any] | Sequence[Any] | None, names: list[str], param: str
) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                raise InvalidArgumentError(
                    f"{param} names column {name!r}, which is not among {', '.join(map(repr, names))}."
                )
        pairs = list(given.items())
    else:
        if isinstance(given, str) or len(given) != len(names):
            raise InvalidArgumentError(
                f"{param} is {given!r}. Give a dict by column name, or a list of {len(names)} entries, one "
                f"for each of {', '.join(map(repr, names))}."
            )
        pairs = list(zip(names, given, strict=True))
    return {name: dtype_name(dtype) for name, dtype in pairs if dtype is not None}
