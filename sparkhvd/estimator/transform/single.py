"""Prediction of one row on the driver, without Spark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pyspark.ml.linalg import Vector, VectorUDT
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField, StructType

from sparkhvd.data.columns.schema import Column
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.binding import (
    bind_module,
    functions_of,
    match_columns,
    source_names,
)
from sparkhvd.estimator.transform.worker import Computation, Output, features, run, to_arrow
from sparkhvd.training.modules.fitted import TrainedState
from sparkhvd.training.to_device import Mover

Array = npt.NDArray[np.float64]
Row: TypeAlias = Vector | Sequence[float] | npt.NDArray[Any]

# Kinds of columns with a fixed count of numbers per row.
_NUMBERS = ("scalar", "array", "vector", "sparse")


def num_features(fitted: TrainedState) -> int:
    """Count the numbers of a row that the model reads; -1 if unknown or not all numbers."""
    if not fitted.columns or not all(map(_is_numbers, fitted.columns)):
        return -1
    return sum(c.num_elements for c in fitted.columns)


def bind_row(
    fitted: TrainedState, options: PredictOptions, value: Row
) -> tuple[TrainedState, PredictOptions]:
    """Bind a module without a fit to the columns of a row: one vector, or one number each."""
    names = options.feature_cols or []
    if fitted.columns:
        return fitted, options
    fields = [StructField(name, DoubleType()) for name in names]
    if len(names) == 1:
        width = {"ml_attr": {"num_attrs": len(_numbers(value))}}
        fields = [StructField(names[0], VectorUDT(), metadata=width)]
    return bind_module(fitted, options, StructType(fields))


def predict_one(fitted: TrainedState, options: PredictOptions, output: Output, value: Row) -> Array:
    """Compute an output column for one row, as `transform` does.

    Args:
        fitted: the trained module with its columns.
        options: as for `transform`.
        output: the column.
        value: the row's numbers, concatenated over feature columns as by a VectorAssembler.

    Raises:
        InvalidArgumentError: the count of numbers is wrong, a number cannot be used, or the model reads columns that a vector
            of numbers cannot represent.
    """
    names = source_names(fitted, options)
    fields, arrays = [], []
    for name, column, part in zip(names, fitted.columns, _split(fitted, value), strict=True):
        kind, array = _typed(column, part)
        fields.append(StructField(name, kind))
        arrays.append(array)
    computation = Computation(
        columns=fitted.inputs.with_casts(match_columns(fitted, options, StructType(fields))),
        sources=tuple(range(len(names))),
        names=tuple(names),
        inputs=fitted.inputs,
        links=fitted.output_links,
        outputs=(output,),
        output_fn=options.output_fn,
        functions=functions_of(fitted, options),
        thresholds=options.thresholds,
        precision=options.precision,
    )
    batch = pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(arrays))])
    batch, columns = features(computation, batch)
    if not batch.num_rows:
        raise InvalidArgumentError(
            "predict: handle_invalid says to skip this row, which has a number that cannot be used."
        )
    with torch.no_grad():
        (values,) = run(computation, fitted.for_predict, columns, Mover(torch.device("cpu")))
    row: Array = values[0]
    return row


def _is_numbers(column: Column) -> bool:
    has_functions = column.has_decoder or column.is_collated
    return column.kind in _NUMBERS and column.shape is not None and not has_functions


def _numbers(value: Row) -> Array:
    numbers = value.toArray() if isinstance(value, Vector) else value
    return np.asarray(numbers, np.float64).reshape(-1)


def _split(fitted: TrainedState, value: Row) -> list[Array]:
    """Split the numbers of a row by feature column."""
    for column in fitted.columns:
        if not _is_numbers(column):
            raise InvalidArgumentError(
                f"predict takes one vector of numbers, and the model reads column {column.name!r} of type {column.source}, "
                "which a vector cannot stand for. Use transform with a DataFrame of one row."
            )
    row = _numbers(value)
    sizes = [c.num_elements for c in fitted.columns]
    if len(row) != sum(sizes):
        parts = ", ".join(f"{c.name!r} {n}" for c, n in zip(fitted.columns, sizes, strict=True))
        raise InvalidArgumentError(
            f"predict: the vector has {len(row)} elements, and the model reads {sum(sizes)} ({parts})."
        )
    return np.split(row, np.cumsum(sizes)[:-1])


def _typed(column: Column, part: Array) -> tuple[DataType, pa.Array]:
    """Convert a column's part of the row to its Spark and Arrow types in a DataFrame."""
    shape = column.shape or ()
    if column.kind == "scalar":
        return DoubleType(), pa.array(part)
    if len(shape) == 1:
        return VectorUDT(), to_arrow(part.reshape(1, math.prod(shape)))
    kind: DataType = DoubleType()
    for _ in shape:
        kind = ArrayType(kind)
    return kind, pa.array([part.reshape(shape).tolist()])
