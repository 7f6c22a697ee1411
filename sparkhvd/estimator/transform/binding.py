"""Bind a module to columns on the driver, by its training or by the Params and the DataFrame's types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from sparkhvd.data.arrow_limits import warn_of_large_batches
from sparkhvd.data.arrow_types import byte_rows
from sparkhvd.data.columns.binding import bind_inputs, columns_in, model_dtype
from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.labels import LINKS, link_of
from sparkhvd.data.columns.schema import (
    RAW_TYPES,
    AnyField,
    AnySchema,
    AnyType,
    Column,
    DataSchema,
    Shaped,
    row_shape_of,
)
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.training.loss_functions import construct_losses
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.fitted import TrainedState, fitted_widths, output_widths
from sparkhvd.training.modules.modes import in_mode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Shape = tuple[int, ...]


def _links_of(loss: object, link: str | Sequence[str] | None) -> tuple[str, ...]:
    """Choose the links from outputs to probabilities, by name or by the losses.

    An unknown link is "identity".

    Raises:
        InvalidArgumentError: both are given, or a name is unknown.
    """
    if link is None:
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        return tuple(link_of(each) for each in losses)
    links = (link,) if isinstance(link, str) else tuple(link)
    unknown = [each for each in links if each not in LINKS]
    if loss is not None or unknown:
        raise InvalidArgumentError(
            f"link is {link!r}{' and loss is given, too' if loss is not None else ''}. Give either the loss of the training, or for each "
            f"output one of {', '.join(map(repr, LINKS))}."
        )
    return links


def described(
    fitted: TrainedState,
    *,
    loss: object = None,
    loss_constructors: object = None,
    link: str | Sequence[str] | None = None,
    history: Sequence[Mapping[str, Any]] | None = None,
    run_id: str | None = None,
) -> TrainedState:
    """Add facts about its training to a module."""
    made = construct_losses(loss, loss_constructors, fitted.module)
    return replace(
        fitted,
        loss=made,
        links=_links_of(made, link),
        history=[dict(record) for record in history or ()],
        run_id=run_id or "",
    )


def bind_module(
    fitted: TrainedState,
    options: PredictOptions,
    schema: AnySchema,
    *,
    may_measure: bool = False,
) -> tuple[TrainedState, PredictOptions]:
    """Bind a module without a fit to the columns of a DataFrame with this schema, by the rules of a fit.

    Types do not give the length of an array or the shape of decoded values. `input_shapes` or a vector's metadata give
    them.

    Args:
        fitted: module.
        options: values of the Params.
        schema: schema of the DataFrame.
        may_measure: leave the widths empty if a run on made-up rows fails, because the caller can run the module on
            real rows.

    Returns:
        The module with its columns, labels, links and widths, and the Params with decoders that give these shapes.

    Raises:
        InvalidArgumentError: a column is missing, has a type without a tensor form or an unknown width, or the module
            does not accept the columns.
    """
    if not options.feature_cols and options.inputs:
        options = replace(options, feature_cols=columns_in(options.inputs))
    if not options.feature_cols:
        raise InvalidArgumentError(
            "transform: feature_cols is required, because this module was not trained by a fit: name the columns that become its input."
        )
    has_shapes = options.input_shapes is not None
    columns = check_schema(
        schema,
        feature_cols=options.feature_cols,
        label_cols=[],
        model_dtype=model_dtype(fitted.module),
        feature_dtypes=options.feature_dtypes,
        decoders=options.decoders or {},
        collated=options.collate_fn or {},
        # input_shapes describe dense tensors, so vectors become dense.
        sparse_cols=[] if options.sparse_cols is None and has_shapes else options.sparse_cols,
    ).features
    shapes = _row_shapes(options)
    fields = {field.name: field for field in schema.fields}
    columns = tuple(_shaped(c, fields[c.name], shapes.get(c.name), options) for c in columns)
    inputs = bind_inputs(
        fitted.module,
        DataSchema(columns, ()),
        input_shapes=options.input_shapes,
        inputs=options.inputs,
    )
    bound = replace(fitted, columns=columns, inputs=inputs)
    decoded = {c.name: c.decoded for c in columns}
    decoders = {
        name: Shaped(decoder, shape) if callable(decoder) and (shape := decoded[name]) else decoder
        for name, decoder in (options.decoders or {}).items()
    }
    options = replace(options, decoders=decoders)
    widths = fitted.widths or _widths(bound, options.precision, may_measure=may_measure)
    return (name_outputs(bound, options, widths) if widths else bound), options


def name_outputs(
    bound: TrainedState, options: PredictOptions, widths: tuple[int, ...]
) -> TrainedState:
    """Add widths, labels and links of the outputs to a bound module.

    Raises:
        InvalidArgumentError: no Param names the outputs, or the number of losses differs from the number of outputs.
    """
    labels = _labels(options, widths)
    links = bound.links * len(widths) if len(bound.links) == 1 else bound.links
    if len(links) != len(widths):
        raise InvalidArgumentError(
            f"The model was given {len(links)} losses, but its module has {len(widths)} outputs. Give one loss per output, or one for all."
        )
    return replace(bound, widths=widths, labels=labels, links=links)


def _row_shapes(options: PredictOptions) -> dict[str, Shape]:
    """Collect the shapes of rows from `input_shapes` by column."""
    given = options.input_shapes
    if given is None:
        return {}
    pairs: list[tuple[str, Sequence[int]]]
    if isinstance(given, Mapping):
        entries = [(options.inputs or {}).get(argument, "") for argument in given]
        single = [e if isinstance(e, str) else e[0] if len(e) == 1 else "" for e in entries]
        pairs = list(zip(single, given.values(), strict=True))
    else:  # `bind_inputs` checks that there is one shape per column
        pairs = list(zip(options.feature_cols or [], given, strict=False))
    shapes = {name: row_shape_of("input_shapes", shape) for name, shape in pairs}
    return {name: shape for name, shape in shapes.items() if -1 not in shape}


def _shaped(
    column: Column, field: AnyField, given: Shape | None, options: PredictOptions
) -> Column:
    """Set the shape of a column's rows, without reading rows."""
    if column.is_collated or column.shape is not None:
        return column
    if column.has_decoder:
        seen = _looked_up(column, options)
        if seen is not None:
            return seen
        if given is not None:
            return replace(column, decoded=given)
    elif given is not None:
        return column.with_shape(_stored_shape(column, given))
    elif (width := width_of(field)) is not None:
        return column.with_shape((width,))
    reason = "a decoder gives" if column.has_decoder else f"{column.source} has"
    raise InvalidArgumentError(
        f"transform: column {column.name!r}: before rows are read, it is not known how many elements per row {reason}. Give input_shapes, one "
        "shape per feature column such as [-1, 4]. For a vector, metadata as VectorAssembler writes them are enough."
    )


def _looked_up(column: Column, options: PredictOptions) -> Column | None:
    """Set a column's shape and dtype from the values of its dict decoder.

    Returns None for other decoders.
    """
    decoder = (options.decoders or {}).get(column.name)
    if not isinstance(decoder, Mapping) or not decoder:
        return None
    functions = RowFunctions({column.name: decoder})
    example = byte_rows(pa.array([next(iter(decoder))]))
    return functions.with_decoded(DataSchema((column,), ()), {column.name: example}).features[0]


def _stored_shape(column: Column, given: Shape) -> Shape:
    """Find the shape of a column's rows in Spark.

    It has an axis per level of nested arrays, or one axis for a flat array or a vector.
    """
    depth = max(1, column.source.count("array<"))
    if depth == 1:
        return (math.prod(given),)
    for shape in (given, tuple(n for n in given if n != 1)):
        if len(shape) == depth:
            return shape
    raise InvalidArgumentError(
        f"transform: column {column.name!r} is of type {column.source}, but input_shapes gives {list(given)} per row: the shape does not "
        f"match {depth} nested array levels. Flatten the column first: flatten({column.name})."
    )


def _widths(bound: TrainedState, precision: str, *, may_measure: bool) -> tuple[int, ...]:
    """Find the elements per row of each output by a run of the module on made-up rows."""
    collated = [c.name for c in bound.columns if c.is_collated]
    if not collated:
        trial = in_mode(light_copy(bound.module), is_training=False)
        widths = output_widths(trial, bound.inputs, bound.columns, precision=precision)
        if widths is not None:
            return widths
    if may_measure:
        return ()
    reason = (
        f"column {collated[0]!r} is collated" if collated else "its forward failed on rows of zeros"
    )
    raise InvalidArgumentError(
        f"transform: the outputs of the module are not known, because {reason}. Give the number of elements per row of each output: "
        "TorchModel.from_module(..., widths=[1])."
    )


def _labels(options: PredictOptions, widths: Sequence[int]) -> tuple[str, ...]:
    if options.label_cols:
        fitted_widths(widths, options.label_cols)
    elif not options.outputCols:
        raise InvalidArgumentError(
            f"transform: the module's {len(widths)} outputs have no names. Set outputCols, or label_cols, which name the output columns."
        )
    return tuple(options.label_cols or ())


# ----------------------------------------------------------------------------------------------------
# Match the columns of a DataFrame with the training columns, on the driver.

Function = TypeVar("Function")

# Types that Spark cannot send to a Python function, even if the function does not use the column.
_NOT_SENT = ("CalendarIntervalType", "YearMonthIntervalType", "NullType", "VariantType")
# Kind -> layout. Kinds with the same layout may replace each other: an array may replace a vector.
_LAYOUTS = {"vector": "rows", "array": "rows", "sparse": "rows"}


def source_names(fitted: TrainedState, options: PredictOptions) -> list[str]:
    """List the model's input columns in the DataFrame, in the order of the training columns."""
    names = options.feature_cols or [c.name for c in fitted.columns]
    if len(names) != len(fitted.columns):
        raise InvalidArgumentError(
            f"feature_cols has {len(names)} columns; the model was trained with {len(fitted.columns)}: "
            f"{listed(repr(c.name) for c in fitted.columns)}."
        )
    return list(names)


def match_columns(
    fitted: TrainedState,
    options: PredictOptions,
    schema: AnySchema,
    data_name: str = "DataFrame",
) -> tuple[Column, ...]:
    """Find the training columns in a DataFrame's schema. An array may replace a vector.

    Raises:
        InvalidArgumentError: a column is missing, or has a type that does not fit its training column.
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
        data_name=data_name,
    ).features
    matched = list(zip(columns, fitted.columns, strict=True))
    fields = {field.name: field for field in schema.fields}
    for column, trained in matched:
        _check_type(column, trained, fields[column.name])
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
    """Rename the columns in `handle_invalid` to the names in this DataFrame, and drop entries for labels."""
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


def _check_type(column: Column, trained: Column, field: AnyField) -> None:
    is_array_for_sparse = (column.kind, trained.kind) == ("array", "sparse")
    if _layout(column) != _layout(trained) or is_array_for_sparse:
        raise InvalidArgumentError(
            f"transform: column {column.name!r} is of type {column.source}, but the model was trained with "
            f"{trained.source}."
        )
    width = width_of(field)
    if width is not None and trained.shape is not None and width != trained.num_elements:
        raise InvalidArgumentError(
            f"transform: column {column.name!r} has {width} elements per row according to its metadata, but the model "
            f"takes {trained.num_elements}."
        )


def _check_untransformed(
    pairs: Sequence[tuple[str, Column]], options: PredictOptions, schema: AnySchema
) -> None:
    """Reject encoded values of a column if training transformed the decoded values."""
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
                f"changed the result of decoders[{trained.name!r}], but transform calls no transformations. Give a column "
                f"of numbers as the model gets them: {shape} per row, {trained.tensor_dtype}."
            )


def functions_of(fitted: TrainedState, options: PredictOptions) -> RowFunctions:
    """Select the user's functions, and name them by the training columns.

    Raises:
        InvalidArgumentError: a function of the training is missing.
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
            f"transform: the model was trained with {param} for {listed(map(repr, missing))}, but the Param is not "
            f"set any more. Set {param} again."
        )
    return {name: functions[name] for name in columns}


def check_passing(schema: AnySchema) -> None:
    """Reject columns that Spark cannot send through a Python function.

    This includes columns that the model does not read.
    """
    for column in schema.fields:
        if any(type(part).__name__ in _NOT_SENT for part in _parts(column.dataType)):
            raise InvalidArgumentError(
                f"transform: column {column.name!r} is of type {column.dataType.simpleString()}, which Spark cannot send "
                "through a Python function. Drop it first, or cast it (for example to string) and back."
            )


def warn_of_large_rows(fitted: TrainedState, options: PredictOptions, df: DataFrame) -> None:
    """Warn if rows may be too large for Spark's Arrow batches."""
    pairs = zip(source_names(fitted, options), fitted.columns, strict=True)
    kinds = ("array", "vector")
    known = {n: c.num_elements for n, c in pairs if c.kind in kinds and c.shape is not None}
    warn_of_large_batches(df, known)


def _parts(data_type: AnyType) -> Iterator[AnyType]:
    """Iterate over a Spark type and all types inside it."""
    yield data_type
    inside = [getattr(data_type, n, None) for n in ("elementType", "keyType", "valueType")]
    for part in [*inside, *(f.dataType for f in getattr(data_type, "fields", ()))]:
        if part is not None:
            yield from _parts(part)


def _layout(column: Column) -> str:
    return _LAYOUTS.get(column.kind, column.kind)


def _kind(column: Column, trained: Column) -> str:
    """Choose the kind of a column: "sparse" for vectors sparse in training, else its own kind."""
    return trained.kind if column.kind == "vector" and trained.kind == "sparse" else column.kind


def width_of(field: AnyField) -> int | None:
    """Read the elements per row of a vector from Spark ML's metadata, or return None if unknown."""
    attributes = (field.metadata or {}).get("ml_attr", {})
    if type(field.dataType).__name__ != "VectorUDT" or not isinstance(attributes, Mapping):
        return None
    if "num_attrs" in attributes:
        return int(attributes["num_attrs"])
    groups = attributes.get("attrs")
    return sum(len(group) for group in groups.values()) if groups else None
