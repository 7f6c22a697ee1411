"""Predict in this process without Spark, for `LocalModel` and for Spark ML's `predict` of one row.

This module does not import pyspark, because a prediction service may not have it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from sparkhvd.data.arrow_types import is_list, nested, plain, spark_type
from sparkhvd.data.columns.binding import columns_in, quoted
from sparkhvd.data.columns.schema import Column, Field, Schema, spark_type_of
from sparkhvd.errors import InvalidArgumentError, listed
from sparkhvd.estimator.params.generated import PredictOptions
from sparkhvd.estimator.transform.binding import (
    bind_module,
    functions_of,
    match_columns,
    name_outputs,
    source_names,
)
from sparkhvd.estimator.transform.outputs import named_outputs
from sparkhvd.estimator.transform.worker import (
    Computation,
    Output,
    compute,
    features,
    usable_batch,
)
from sparkhvd.training.modules.copies import light_copy
from sparkhvd.training.modules.fitted import TrainedState, failure_on_zeros
from sparkhvd.training.to_device import Mover

if TYPE_CHECKING:
    from pyspark.ml.linalg import Vector


Array = npt.NDArray[np.float64]
Row: TypeAlias = "Vector | Sequence[float] | npt.NDArray[Any]"

# Kinds of columns with a fixed number of numbers per row.
_NUMBERS = ("scalar", "array", "vector", "sparse")
_CPU = torch.device("cpu")


class LocalModel:
    """Trained model for predictions in any Python process.

    `sparkhvd.load_local` and `TorchModel.local` make it. It prepares columns as `TorchModel.transform` does: casts,
    decoders, collate functions, sparse vectors, `handle_invalid`, and their binding to arguments of `forward`. It
    computes on the CPU, in eval mode, without gradients, in the fit's `precision`.

    Threads: any number of threads may call `predict`. The model runs one call at a time, with all threads of torch.

    Attributes:
        feature_cols: names of the columns that `predict` reads.
        output_cols: keys of the result of `predict`; empty for a module without a fit, whose outputs depend on the
            data.
    """

    def __init__(self, fitted: TrainedState, options: PredictOptions) -> None:
        self._fitted, self._options = fitted, options
        # A copy of the module, because `forward` may keep tensors or change buffers.
        self._module = light_copy(fitted.module)
        self._lock = threading.Lock()
        self.feature_cols = _feature_names(fitted, options)
        known = named_outputs(fitted, options) if fitted.columns and fitted.widths else ()
        self.output_cols = [output.name for output in known]

    def __repr__(self) -> str:
        names = listed(self.feature_cols), listed(self.output_cols) or "?"
        return f"LocalModel of {type(self._module).__name__}: {names[0]} -> {names[1]}"

    def predict(self, data: Any) -> dict[str, Array]:
        """Compute the columns that `transform` would add.

        Args:
            data: rows as a pandas or polars DataFrame, an Arrow table or batch, a dict from columns to arrays, tensors
                or lists with an entry per row, or a list of dicts from columns to values, one per row. A dict with a
                plain number or text among its values is one row. Other columns than `feature_cols` are ignored. Entries
                of a vector or array are rows of an array (rows, *shape), or lists; those of a sparse vector also rows
                of a sparse matrix of torch or scipy.
                One array or tensor holds all columns: (rows, numbers), side by side in the order of `feature_cols`, or
                (rows, *shape) of the only column.

        Returns:
            Output column -> float64 array with an entry per row: (rows,) for a number, (rows, elements) for a vector.
            Rows that `handle_invalid` or a decoder skips are NaN.

        Raises:
            InvalidArgumentError: a column is missing, has another type or shape than in training, or holds values that
                cannot be used.
        """
        try:
            return self._predict(data)
        except InvalidArgumentError as e:
            if type(e) is not InvalidArgumentError:
                raise
            text = str(e).removeprefix("transform: ").removeprefix("predict: ")
            raise InvalidArgumentError(f"predict: {text}") from e.__cause__

    def _predict(self, data: Any) -> dict[str, Array]:
        fitted, options = self._fitted, self._options
        given = _Given.of(data, fitted, self.feature_cols)
        if not given.num_rows and fitted.columns:
            given.check_names(self.feature_cols)
            return _spread([], _outputs(fitted, options), np.zeros(0, np.bool_))
        trained = dict(zip(self.feature_cols, fitted.columns, strict=False))
        arrays = given.arrays(self.feature_cols, trained)
        if not fitted.columns:
            schema = given.schema(arrays, widths=True)
            fitted, options = bind_module(fitted, options, schema, may_measure=True)
            if not fitted.widths:
                widths = self._measure_widths(fitted, options, given, arrays)
                # Kept, so that the widths are measured only once.
                self._fitted = replace(self._fitted, widths=widths)
                fitted = name_outputs(fitted, options, widths)
        outputs = _outputs(fitted, options)
        names = source_names(fitted, options)
        spec = _computation(fitted, options, outputs, given.schema(arrays), names)
        batch, kept = usable_batch(spec, _batch([arrays[name] for name in names]))
        done = np.ones(given.num_rows, np.bool_) if kept is None else kept
        if not batch.num_rows:
            return _spread([], outputs, done)
        # Copy the arrays, because Arrow shares the caller's memory and `forward` may write to its input.
        found = features(spec, batch).items()
        columns = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in found}
        with self._lock:
            values, missing = compute(spec, self._module, columns, Mover(_CPU))
        if not missing.any():
            return _spread(values, outputs, done)
        done[done] = ~missing
        return _spread([each[~missing] for each in values], outputs, done)

    def _measure_widths(
        self,
        fitted: TrainedState,
        options: PredictOptions,
        given: _Given,
        arrays: Mapping[str, pa.Array],
    ) -> tuple[int, ...]:
        """Find the elements per row of each output by a run of the module on the caller's rows."""
        names = source_names(fitted, options)
        outputs = (Output("widths", "widths", 0, is_vector=True),)
        spec = _computation(fitted, options, outputs, given.schema(arrays), names)
        batch, _ = usable_batch(spec, _batch([arrays[name] for name in names]))
        if not batch.num_rows:
            raise InvalidArgumentError(
                "the outputs of the model are not known, because its forward failed on made-up rows and the data have no rows. Give rows."
            )
        with self._lock:
            values, _ = compute(spec, self._module, dict(features(spec, batch)), Mover(_CPU))
        return tuple(int(width) for width in values[0][0])


def _feature_names(fitted: TrainedState, options: PredictOptions) -> list[str]:
    if fitted.columns:
        return source_names(fitted, options)
    return list(options.feature_cols or columns_in(options.inputs or {}))


def _outputs(fitted: TrainedState, options: PredictOptions) -> tuple[Output, ...]:
    if not fitted.widths:
        raise InvalidArgumentError(
            "the outputs of the model are not known, because its forward failed on made-up rows on the driver and, after training, on the "
            f"ranks' first batch{failure_on_zeros(fitted)}. Give setModel a module whose forward runs in eval mode, without ranks, and save "
            "the model again."
        )
    outputs = named_outputs(fitted, options)
    names = [output.name for output in outputs]
    if len({*names}) < len(names):
        raise InvalidArgumentError(
            f"two output columns have one name: {quoted(names)}. Set another name before the model is saved."
        )
    return outputs


def _spread(
    values: Sequence[npt.NDArray[Any]], outputs: Sequence[Output], done: npt.NDArray[np.bool_]
) -> dict[str, Array]:
    """Place computed rows by output column at a mask's True rows. All other rows are NaN."""
    if values and done.all():
        return {output.name: each for output, each in zip(outputs, values, strict=True)}
    found = {}
    for number, output in enumerate(outputs):
        inner = values[number].shape[1:] if values else (output.size,) * output.is_vector
        found[output.name] = np.full((len(done), *inner), np.nan)
        if values:
            found[output.name][done] = values[number]
    return found


def _computation(
    fitted: TrainedState,
    options: PredictOptions,
    outputs: Sequence[Output],
    schema: Schema,
    names: Sequence[str],
) -> Computation:
    """Make the description of how to compute the output columns from the columns `names`, in this order."""
    return Computation(
        columns=fitted.inputs.with_casts(match_columns(fitted, options, schema, "data")),
        sources=tuple(range(len(names))),
        names=tuple(names),
        inputs=fitted.inputs,
        links=fitted.output_links,
        outputs=tuple(outputs),
        output_fn=options.output_fn,
        functions=functions_of(fitted, options),
        thresholds=options.thresholds,
        precision=options.precision,
    )


def _batch(arrays: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(arrays))])


# ----------------------------------------------------------------------------------------------------
# Convert the caller's data to Arrow arrays of the model's columns.


@dataclass(frozen=True)
class _Given:
    """Columns given by a caller.

    Attributes:
        columns: (name, values) of each column, in order; a name may occur twice.
        num_rows: number of rows.
    """

    columns: Sequence[tuple[str, Any]]
    num_rows: int

    @classmethod
    def of(cls, data: Any, fitted: TrainedState, names: Sequence[str]) -> _Given:
        """Split data in any supported form into columns.

        Raises:
            InvalidArgumentError: the data have another form, or columns of different lengths.
        """
        if isinstance(data, (pa.Table, pa.RecordBatch)):
            return cls(list(zip(data.schema.names, data.columns, strict=True)), data.num_rows)
        if hasattr(data, "iloc") and hasattr(data, "columns"):  # a pandas DataFrame
            numbered = enumerate(map(str, data.columns))
            return cls([(name, data.iloc[:, i]) for i, name in numbered], len(data))
        if hasattr(data, "to_arrow"):  # a polars DataFrame
            return cls.of(data.to_arrow(), fitted, names)
        if isinstance(data, Mapping):
            if any(map(_is_one, data.values())):
                return cls.of([data], fitted, names)
            return cls._of_columns(data)
        if isinstance(data, (list, tuple)) and all(isinstance(row, Mapping) for row in data):
            keys = dict.fromkeys(name for row in data for name in row) or dict.fromkeys(names)
            return cls([(name, [row.get(name) for row in data]) for name in keys], len(data))
        if isinstance(data, (np.ndarray, Tensor)) and data.ndim:
            return cls(list(_side_by_side(data, fitted, names)), len(data))
        if hasattr(data, "__arrow_c_stream__"):
            return cls.of(pa.table(data), fitted, names)
        kind = type(data)
        remedy = " Give a Spark DataFrame to transform." if hasattr(data, "sparkSession") else ""
        raise InvalidArgumentError(
            f"got a {kind.__module__}.{kind.__qualname__}.{remedy} Give a pandas or polars DataFrame, an Arrow table, a dict of arrays or "
            "tensors by column, a list of dicts, or one array (rows, numbers)."
        )

    @classmethod
    def _of_columns(cls, data: Mapping[Any, Any]) -> _Given:
        columns = [(str(name), values) for name, values in data.items()]
        lengths = {name: _num_rows(name, values) for name, values in columns}
        if len({*lengths.values()}) > 1:
            rows = listed(f"{name!r} {number}" for name, number in lengths.items())
            raise InvalidArgumentError(
                f"the columns have different numbers of rows: {rows}. Give every column one entry per row."
            )
        return cls(columns, next(iter(lengths.values()), 0))

    def check_names(self, names: Sequence[str]) -> None:
        """Check that the data have all columns of the model."""
        there = [name for name, _ in self.columns]
        if missing := [name for name in names if name not in there]:
            raise InvalidArgumentError(
                f"the model reads column {missing[0]!r}, which the data do not have. They have: {quoted(there)}."
            )

    def arrays(self, names: Sequence[str], trained: Mapping[str, Column]) -> dict[str, pa.Array]:
        """Convert the model's columns to Arrow, except missing columns."""
        return {
            name: _array(name, values, trained.get(name))
            for name, values in self.columns
            if name in names
        }

    def schema(self, arrays: Mapping[str, pa.Array], *, widths: bool = False) -> Schema:
        """Make the schema of the columns.

        Args:
            arrays: arrays of the model's columns.
            widths: True describes lists of floats with one length as vectors, whose metadata hold the length.
        """
        return Schema(
            tuple(
                _field(name, arrays[name], has_width=widths)
                if name in arrays
                else Field(name, spark_type(pa.null()))
                for name, _ in self.columns
            )
        )


def _field(name: str, array: pa.Array, *, has_width: bool) -> Field:
    if has_width and is_list(array.type) and pa.types.is_floating(array.type.value_type):
        lengths = np.unique(np.diff(array.offsets.to_numpy()))
        if len(lengths) == 1:
            return _vector_field(name, int(lengths[0]))
    return Field(name, spark_type(array.type))


def _vector_field(name: str, width: int) -> Field:
    return Field(name, spark_type_of("VectorUDT", "vector"), {"ml_attr": {"num_attrs": width}})


def _is_one(value: object) -> bool:
    """Whether a value is the value of a single row, such as a number or text."""
    is_single = isinstance(value, (np.ndarray, Tensor)) and not value.ndim
    return value is None or is_single or isinstance(value, (str, bytes, Number, np.generic))


def _num_rows(name: str, values: Any) -> int:
    shape = getattr(values, "shape", None)  # len() fails for a sparse matrix
    try:
        return int(shape[0]) if shape else len(values)
    except TypeError:
        raise InvalidArgumentError(
            f"column {name!r} is a {type(values).__qualname__}; give an array, a tensor or a list with an entry per row."
        ) from None


def _side_by_side(
    values: npt.NDArray[Any] | Tensor, fitted: TrainedState, names: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Split an array of rows into the model's columns."""
    if len(names) == 1:
        yield names[0], values
        return
    sizes = _sizes(fitted, "a dict from columns to arrays") if fitted.columns else [1] * len(names)
    if values.ndim != 2 or values.shape[1] != sum(sizes):
        parts = listed(f"{name!r} ({n})" for name, n in zip(names, sizes, strict=True))
        raise InvalidArgumentError(
            f"the array has shape {tuple(values.shape)}, but the model needs (rows, {sum(sizes)}): a row holds the numbers of {parts}. Give this shape, or a dict from "
            "columns to arrays."
        )
    start = 0
    for name, size in zip(names, sizes, strict=True):
        yield name, values[:, start : start + size]
        start += size


def _array(name: str, values: Any, trained: Column | None) -> pa.Array:
    """Convert the values of a column to an Arrow array in Spark's forms."""
    try:
        array = plain(_converted(values, trained))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise InvalidArgumentError(
            f"column {name!r} cannot be read: {type(e).__name__}: {e}. Give the same type in all rows, such as numbers, lists of numbers "
            "with one depth, text or bytes."
        ) from e
    if trained is None:
        return array
    if pa.types.is_null(array.type):  # all values are missing, so training decides the type
        raw = {"string": pa.string(), "binary": pa.binary(), "scalar": pa.float64()}
        return pa.nulls(len(array), raw.get(trained.kind, pa.list_(pa.float64())))
    if trained.kind == "sparse" and is_list(array.type):
        return _vectors(array)
    return array


def _converted(values: Any, trained: Column | None) -> pa.Array:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.layout != torch.strided:
            matrix = values.to_sparse_coo().coalesce()
            row_of, indices = matrix.indices().numpy()
            lengths = np.bincount(row_of, minlength=len(matrix))
            starts = np.concatenate([[0], np.cumsum(lengths)])
            return _sparse_vectors(starts, indices, matrix.values().numpy(), matrix.shape[1])
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    elif hasattr(values, "tocsr"):  # a sparse matrix of scipy
        rows = values.tocsr(copy=True)
        rows.sum_duplicates()
        return _sparse_vectors(rows.indptr, rows.indices, rows.data, rows.shape[1])
    elif hasattr(values, "iloc") and not isinstance(values.dtype, np.dtype):
        # An extension type of pandas.
        found = pa.Array.from_pandas(values)
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    elif hasattr(values, "iloc"):
        values = values.to_numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return nested(_shaped(values, trained))
    return _of_objects(list(values), trained)


def _shaped(values: npt.NDArray[Any], trained: Column | None) -> npt.NDArray[Any]:
    """Reshape rows to their shape in training, if the number of elements agrees."""
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    has_shape = trained is not None and trained.kind in ("scalar", "array", "vector")
    shape = trained.shape if trained is not None and has_shape else None
    fits = shape is not None and values.size == len(values) * math.prod(shape)
    return values.reshape(len(values), *shape) if fits and shape is not None else values


def _of_objects(values: list[Any], trained: Column | None) -> pa.Array:
    """Convert Python objects: numbers, text, bytes, lists, arrays, or vectors of Spark ML."""
    first = next((value for value in values if value is not None), None)
    if hasattr(first, "toArray"):
        return _spark_vectors(values)
    if isinstance(first, (np.ndarray, Tensor)):
        values = [None if value is None else value.tolist() for value in values]
    elif any(
        isinstance(value, (str, bytes)) for value in values
    ):  # pandas represents missing text as NaN
        values = [
            None if isinstance(value, float) and value != value else value for value in values
        ]
    array = pa.array(values)
    # JSON may write 1.0 as 1. So if training had floating numbers, whole numbers are converted to doubles, as in Spark.
    is_whole = trained is None or not trained.is_floating or _is_whole(trained)
    return array if is_whole else array.cast(_with_doubles(array.type), safe=False)


def _is_whole(column: Column) -> bool:
    return column.source.rstrip(">").rpartition("<")[2] in ("tinyint", "smallint", "int", "bigint")


def _with_doubles(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind):
        return pa.float64()
    return pa.list_(_with_doubles(kind.value_type)) if is_list(kind) else kind


def _vectors(lists: pa.Array) -> pa.Array:
    """Convert lists of numbers to Spark's struct of dense vectors."""
    rows = len(lists)
    is_null = lists.is_null()
    return pa.StructArray.from_arrays(
        [
            nested(np.ones(rows, np.int8)),
            pa.nulls(rows, pa.int32()),
            pa.nulls(rows, pa.list_(pa.int32())),
            lists.cast(pa.list_(pa.float64())),
        ],
        names=["type", "size", "indices", "values"],
        mask=is_null if lists.null_count else None,
    )


def _spark_vectors(values: Sequence[Any]) -> pa.Array:
    """Convert vectors of Spark ML, as `toPandas` returns them."""
    empty = np.zeros(0)
    indices, numbers, sizes = [], [], []
    for value in values:
        dense = empty if value is None or hasattr(value, "indices") else value.toArray()
        indices.append(getattr(value, "indices", np.flatnonzero(dense)))
        numbers.append(value.values if hasattr(value, "indices") else dense[indices[-1]])
        sizes.append(getattr(value, "size", 0))
    starts = np.concatenate([[0], np.cumsum([len(row) for row in indices])])
    is_null = pa.array([value is None for value in values])
    parts = np.concatenate(indices), np.concatenate(numbers)
    return _sparse_vectors(starts, *parts, np.array(sizes), is_null)


def _sparse_vectors(
    starts: npt.NDArray[Any],
    indices: npt.NDArray[Any],
    values: npt.NDArray[Any],
    width: int | npt.NDArray[Any],
    is_null: pa.Array | None = None,
) -> pa.Array:
    """Convert rows in CSR layout, with ascending indices, to Spark's struct of sparse vectors."""
    offsets = nested(starts.astype(np.int32))
    rows = len(starts) - 1
    return pa.StructArray.from_arrays(
        [
            nested(np.zeros(rows, np.int8)),
            nested(np.broadcast_to(np.asarray(width, np.int32), rows)),
            pa.ListArray.from_arrays(offsets, nested(indices.astype(np.int32))),
            pa.ListArray.from_arrays(offsets, nested(values.astype(np.float64))),
        ],
        names=["type", "size", "indices", "values"],
        mask=is_null,
    )


# ----------------------------------------------------------------------------------------------------
# One row of numbers, for Spark ML's `predict` on the driver.


def num_features(fitted: TrainedState) -> int:
    """Count the input numbers per row, or return -1 if unknown or if some are not numbers."""
    if not fitted.columns or not all(map(_is_numbers, fitted.columns)):
        return -1
    return sum(c.num_elements for c in fitted.columns)


def bind_row(
    fitted: TrainedState, options: PredictOptions, value: Row
) -> tuple[TrainedState, PredictOptions]:
    """Bind a module without a fit to the columns of one row: a single vector, or one number per column."""
    names = options.feature_cols or []
    if fitted.columns:
        return fitted, options
    fields = tuple(Field(name, spark_type(pa.float64())) for name in names)
    if len(names) == 1:
        fields = (_vector_field(names[0], len(_numbers(value))),)
    return bind_module(fitted, options, Schema(fields))


def predict_one(fitted: TrainedState, options: PredictOptions, output: Output, value: Row) -> Array:
    """Compute an output column for one row, as `transform` does.

    Args:
        fitted: the trained module with its columns.
        options: as for `transform`.
        output: the column.
        value: the row's numbers, concatenated over feature columns as by a VectorAssembler.

    Raises:
        InvalidArgumentError: the count of numbers is wrong, a number cannot be used, or the model reads columns that a
            vector of numbers cannot represent.
    """
    names = source_names(fitted, options)
    pairs = zip(names, fitted.columns, _split(fitted, value), strict=True)
    arrays = [_array(name, part[None], column) for name, column, part in pairs]
    fields = zip(names, arrays, strict=True)
    schema = Schema(tuple(Field(name, spark_type(array.type)) for name, array in fields))
    computation = _computation(fitted, options, (output,), schema, names)
    batch, _ = usable_batch(computation, _batch(arrays))
    if not batch.num_rows:
        raise InvalidArgumentError(
            "predict: this row has a number that cannot be used, and handle_invalid='skip' would skip it. Give another number."
        )
    (values,), _ = compute(
        computation, fitted.for_predict, features(computation, batch), Mover(_CPU)
    )
    row: Array = values[0]
    return row


def _is_numbers(column: Column) -> bool:
    has_functions = column.has_decoder or column.is_collated
    return column.kind in _NUMBERS and column.shape is not None and not has_functions


def _numbers(value: Any) -> Array:
    numbers = value.toArray() if hasattr(value, "toArray") else value
    return np.asarray(numbers, np.float64).reshape(-1)


def _sizes(fitted: TrainedState, instead: str) -> list[int]:
    """Count the numbers per row of each column.

    Raises:
        InvalidArgumentError: a column is not made of numbers.
    """
    for column in fitted.columns:
        if not _is_numbers(column):
            raise InvalidArgumentError(
                f"predict takes one vector of numbers, but the model reads column {column.name!r} of type {column.source}, "
                f"whose values a vector cannot hold. Use {instead}."
            )
    return [c.num_elements for c in fitted.columns]


def _split(fitted: TrainedState, value: Row) -> list[Array]:
    """Split the numbers of a row by feature column."""
    sizes = _sizes(fitted, "transform with a DataFrame of one row")
    row = _numbers(value)
    if len(row) != sum(sizes):
        parts = listed(f"{c.name!r} ({n})" for c, n in zip(fitted.columns, sizes, strict=True))
        raise InvalidArgumentError(
            f"predict: the vector has {len(row)} elements, but the model needs {sum(sizes)}: the numbers of {parts}."
        )
    return np.split(row, np.cumsum(sizes)[:-1])
