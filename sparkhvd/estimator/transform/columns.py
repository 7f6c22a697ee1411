"""Columns of a DataFrame matched to those that the model was trained with; checked on the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pyspark.ml.linalg import VectorUDT

from sparkhvd.data.arrow_limits import warn_of_large_batches
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import RAW_TYPES, Column
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.options import PredictOptions
from sparkhvd.training.modules.fitted import Fitted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = [
    "check_passing",
    "functions_of",
    "match_columns",
    "source_names",
    "warn_of_large_rows",
    "width_of",
]

Function = TypeVar("Function")

# Spark's types that it sends to no Python function, whatever the function does with them.
_NOT_SENT = ("CalendarIntervalType", "YearMonthIntervalType", "NullType", "VariantType")
# Kinds that can stand for each other have one layout: an array may stand for a vector.
_LAYOUTS = {"vector": "rows", "array": "rows", "sparse": "rows"}


def source_names(fitted: Fitted, options: PredictOptions) -> list[str]:
    """List the DataFrame's columns that the model reads, in the order of the training columns."""
    names = options.feature_cols or [c.name for c in fitted.columns]
    if len(names) != len(fitted.columns):
        raise InvalidArgumentError(
            f"feature_cols has {len(names)} columns; the model was trained with {len(fitted.columns)}: "
            f"{', '.join(repr(c.name) for c in fitted.columns)}."
        )
    return list(names)


def match_columns(
    fitted: Fitted, options: PredictOptions, schema: StructType
) -> tuple[Column, ...]:
    """Describe the training columns as a DataFrame with this schema has them: an array may stand for a vector.

    Raises:
        InvalidArgumentError: a column is missing, or cannot be what the model was trained with.
    """
    sources = source_names(fitted, options)
    pairs = list(zip(sources, fitted.columns, strict=True))
    _check_untransformed(pairs, options, schema)
    columns = check_schema(
        schema,
        feature_cols=sources,
        label_cols=[],
        feature_dtypes={name: c.tensor_dtype for name, c in pairs if c.tensor_dtype},
        decoders=[name for name, c in pairs if c.has_decoder],
        collated=[name for name, c in pairs if c.is_collated],
        handle_invalid=_policy(options, pairs),
    ).features
    matched = list(zip(columns, fitted.columns, strict=True))
    for column, trained in matched:
        _check_type(column, trained, schema[column.name])
    return tuple(
        replace(
            trained,
            kind=_kind(column, trained),
            source=column.source,
            is_sparse=trained.kind == "sparse",
            invalid=column.invalid,
        )
        for column, trained in matched
    )


def _policy(
    options: PredictOptions, pairs: Sequence[tuple[str, Column]]
) -> str | Mapping[str, str | float]:
    """Return `handle_invalid` by the names of this DataFrame; entries may have those of the training. Labels are left out."""
    policy = options.handle_invalid or "error"
    if not isinstance(policy, Mapping):
        return policy
    sources = {name for name, _ in pairs}
    entries: dict[str, str | float] = {}
    for name, trained in pairs:
        if name in policy:
            entries[name] = policy[name]
        elif trained.name in policy and trained.name not in sources:
            entries[name] = policy[trained.name]
    return entries


def _check_type(column: Column, trained: Column, field: StructField) -> None:
    is_array_for_sparse = (column.kind, trained.kind) == ("array", "sparse")
    if _layout(column) != _layout(trained) or is_array_for_sparse:
        raise InvalidArgumentError(
            f"transform: column {column.name!r} is of type {column.source}; the model was trained with "
            f"{trained.source}."
        )
    width = width_of(field)
    if width is not None and trained.shape is not None and width != trained.num_elements:
        raise InvalidArgumentError(
            f"transform: column {column.name!r} has {width} elements per row, as its metadata say; the model "
            f"takes {trained.num_elements}."
        )


def _check_untransformed(
    pairs: Sequence[tuple[str, Column]], options: PredictOptions, schema: StructType
) -> None:
    """Refuse encoded values where training transformed what a decoder gave."""
    decoders = options.decoders or {}
    fields = {field.name: field for field in schema.fields}
    for name, trained in pairs:
        if trained.source not in ("transformation_fn", "batch_transform_fn"):
            continue
        if name not in fields or trained.name not in decoders:
            continue
        data_type = fields[name].dataType
        if type(data_type).__name__ in RAW_TYPES:
            shape = list(trained.shape or ())
            raise InvalidArgumentError(
                f"transform: column {name!r} is of type {data_type.simpleString()}. In training {trained.source} "
                f"changed what decoders[{trained.name!r}] gave, and transform calls no transformations. Give a column "
                f"of numbers as the model gets them: {shape} per row, {trained.tensor_dtype}."
            )


def functions_of(fitted: Fitted, options: PredictOptions) -> RowFunctions:
    """Select the user's functions for the training columns, by the names of these.

    Raises:
        InvalidArgumentError: one that the training had is missing.
    """
    return RowFunctions(
        _select("decoders", options.decoders, [c.name for c in fitted.columns if c.has_decoder]),
        _select(
            "collate_fn", options.collate_fn, [c.name for c in fitted.columns if c.is_collated]
        ),
    )


def _select(
    param: str, functions: Mapping[str, Function] | None, columns: Sequence[str]
) -> dict[str, Function]:
    functions = functions or {}
    missing = [name for name in columns if name not in functions]
    if missing:
        raise InvalidArgumentError(
            f"transform: the model was trained with {param} for {', '.join(map(repr, missing))}, which it has "
            f"no longer. Set {param} again."
        )
    return {name: functions[name] for name in columns}


def check_passing(schema: StructType) -> None:
    """Refuse columns that cannot pass through a Python function, also where the model does not look at them."""
    for column in schema.fields:
        if any(type(part).__name__ in _NOT_SENT for part in _parts(column.dataType)):
            raise InvalidArgumentError(
                f"transform: column {column.name!r} is of type {column.dataType.simpleString()}, which Spark cannot send "
                "through a Python function. Drop it before, or cast it (for example to string) and back."
            )


def warn_of_large_rows(fitted: Fitted, options: PredictOptions, df: DataFrame) -> None:
    """Warn where rows are so large that Spark's Arrow batches may not hold them."""
    pairs = zip(source_names(fitted, options), fitted.columns, strict=True)
    kinds = ("array", "vector")
    known = {n: c.num_elements for n, c in pairs if c.kind in kinds and c.shape is not None}
    warn_of_large_batches(df, known)


def _parts(data_type: DataType) -> Iterator[DataType]:
    """Iterate over a Spark type and all types inside it."""
    yield data_type
    inside = [getattr(data_type, n, None) for n in ("elementType", "keyType", "valueType")]
    for part in [*inside, *(f.dataType for f in getattr(data_type, "fields", ()))]:
        if part is not None:
            yield from _parts(part)


def _layout(column: Column) -> str:
    return _LAYOUTS.get(column.kind, column.kind)


def _kind(column: Column, trained: Column) -> str:
    """Return the kind by which values are read: their own, but sparse for a vector that was sparse in training."""
    return trained.kind if column.kind == "vector" and trained.kind == "sparse" else column.kind


def width_of(field: StructField) -> int | None:
    """Return the elements per row of a vector, where Spark ML wrote them down."""
    attributes = (field.metadata or {}).get("ml_attr", {})
    if not isinstance(field.dataType, VectorUDT) or not isinstance(attributes, Mapping):
        return None
    if "num_attrs" in attributes:
        return int(attributes["num_attrs"])
    groups = attributes.get("attrs")
    return sum(len(group) for group in groups.values()) if groups else None
