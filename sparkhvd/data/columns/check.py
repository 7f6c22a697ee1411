"""Check the columns of a DataFrame on the driver, and decide how each is stored."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkhvd.data.columns.schema import (
    FLOATS,
    RAW_TYPES,
    Column,
    DataSchema,
    dtype_name,
    stored_dtype,
)
from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["NUMERIC_TYPES", "SUPPORTED", "check_fraction", "check_schema"]

# Dtypes of columns, by name or in their order: text, or a dtype of torch or numpy.
Dtypes = Mapping[str, object] | Sequence[object]
# Rows with nulls and invalid numbers of a column: ("error",), ("skip",) or ("fill", value).
Policy = tuple[Any, ...]

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


def check_schema(
    df_schema: StructType,
    *,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weight_col: str | None = None,
    validation: float | str | None = None,
    model_dtype: str = "float32",
    feature_dtypes: Dtypes | None = None,
    label_dtypes: Dtypes | None = None,
    class_labels: Sequence[str] = (),
    decoders: Collection[str] = (),
    collated: Collection[str] = (),
    sparse_cols: Sequence[str] | None = None,
    handle_invalid: str | Mapping[str, object] = "error",
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
        data_name: of the source of the columns, for messages.

    Raises:
        InvalidArgumentError: a column is missing, ambiguous, of a type that cannot become a tensor, or has two
            roles. The message names the column, its type and the expected ones.
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

    named = [*features, *labels, *([sample_weight_col] if sample_weight_col else [])]
    _known("decoders", decoders, [*features, *labels])
    _known("collate_fn", collated, [*features, *labels])
    _known("sparse_cols", sparse_cols or (), features)
    policies = _policies(handle_invalid, named)
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


def _policies(policy: str | Mapping[str, object], columns: Sequence[str]) -> dict[str, Policy]:
    """Return by column the policy for nulls and invalid numbers."""
    is_text = isinstance(policy, str)
    by_name: Mapping[str, object]
    if isinstance(policy, str):
        by_name = dict.fromkeys(columns, policy)
    else:
        _known("handle_invalid", policy, columns)
        by_name = policy
    policies: dict[str, Policy] = {}
    for name, value in by_name.items():
        if value in ("error", "skip"):
            policies[name] = (str(value),)
        elif isinstance(value, (bool, int, float)) and not is_text:
            policies[name] = ("fill", value)
        else:
            raise InvalidArgumentError(
                f"handle_invalid is {policy!r}. Give 'error', 'skip' (leave out rows with a null, NaN, infinity or a number "
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
        raise InvalidArgumentError(f"{where}, and NaN is itself replaced. Give a number.")
    if not _holds(column, value):
        raise InvalidArgumentError(
            f"{where}, which {column.tensor_dtype} cannot hold. Give another number, or another type with "
            "feature_dtypes or label_dtypes."
        )


def _holds(column: Column, value: bool | int | float) -> bool:
    """Return True if the stored type can hold a number that is not NaN."""
    if column.dtype not in FLOATS:
        limits = np.iinfo(column.dtype)
        low, high = (0, 1) if column.tensor_dtype == "bool" else (limits.min, limits.max)
        return low <= value <= high and value == int(value)
    if isinstance(value, float) and math.isinf(value):
        return True
    return abs(value) <= float(np.finfo(column.dtype).max)


def check_fraction(validation: object) -> None:
    """Raise InvalidArgumentError unless `validation` is a number in [0, 1)."""
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise InvalidArgumentError(
            f"validation is {validation!r}. Give a fraction in [0, 1) or the name of a column."
        )
    if not 0 <= validation < 1:
        raise InvalidArgumentError(
            f"validation is {validation!r}. A fraction must be at least 0 and less than 1, for example 0.1."
        )


def _names(names: object, param: str) -> list[str]:
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


def _fields_by_name(df_schema: StructType) -> dict[str, list[StructField]]:
    by_name: dict[str, list[StructField]] = {}
    for field in df_schema.fields:
        by_name.setdefault(field.name, []).append(field)
    return by_name


def _field(
    by_name: Mapping[str, list[StructField]], name: str, role: str, data_name: str
) -> StructField:
    fields = by_name.get(name)
    if not fields:
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
    if len(fields) > 1:
        raise InvalidArgumentError(
            f"{role} names column {name!r}, which the {data_name} has {len(fields)} times. "
            "Rename or drop the others first, so that the name is unique."
        )
    return fields[0]


def _listing(names: list[str], limit: int = 30) -> str:
    shown = ", ".join(repr(n) for n in names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def _column(
    field: StructField,
    name: str,
    role: str,
    floating: tuple[str, str],
    override: str | None,
    only_scalar: bool,
) -> Column:
    """Decide the storage of a column of numbers; `floating` are the types of floats in arrays and vectors, and in scalars."""
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
    field: StructField, name: str, role: str, default: str, override: str | None, has_decoder: bool
) -> Column:
    """Decide the storage of a column that a decoder or a collate function gets row by row."""
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
        return "Turn it into a number first, for example with unix_timestamp."
    if source.startswith("array<"):
        return "An array must hold numbers, or arrays of numbers."
    if source.startswith("struct"):
        return "Select its fields as columns of their own."
    return "Turn it into numbers first."


def _overrides(dtypes: Dtypes | None, names: list[str], param: str) -> dict[str, str]:
    if dtypes is None:
        return {}
    if isinstance(dtypes, Mapping):
        for name in dtypes:
            if name not in names:
                raise InvalidArgumentError(
                    f"{param} names column {name!r}, which is not among {', '.join(map(repr, names))}."
                )
        pairs = list(dtypes.items())
    else:
        if isinstance(dtypes, str) or len(dtypes) != len(names):
            raise InvalidArgumentError(
                f"{param} is {dtypes!r}. Give a dict by column name, or a list of {len(names)} entries, one "
                f"for each of {', '.join(map(repr, names))}."
            )
        pairs = list(zip(names, dtypes, strict=True))
    return {name: dtype_name(dtype) for name, dtype in pairs if dtype is not None}
