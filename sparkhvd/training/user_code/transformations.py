"""`transformation_fn` and `batch_transform_fn`: the user's functions between the materialized data and the tensors.

They run in the thread of the training loop, so that their random numbers from torch, numpy and random follow the
epoch's seed. A resumed run then sees the same rows as an uninterrupted run.

Their results determine the shapes and dtypes of the model's inputs. The driver learns the shapes and dtypes from the
first rows, before any rank starts, and the ranks check every batch against them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparkhvd.data.columns.binding import InputBinding
from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.schema import Column, DataSchema, stored_dtype
from sparkhvd.data.reading.source import Source
from sparkhvd.errors import InvalidArgumentError, listed

Array = npt.NDArray[Any]

# Number of rows on which the driver tries the functions, to detect shapes that vary between rows.
PROBED_ROWS = 4


@dataclass(frozen=True)
class Transformations:
    """The user's functions on rows and batches, applied in this order.

    Attributes:
        row: function from a dict of a row's values to such a dict, or None.
        batch: function from a dict of arrays (rows, ...) to such a dict, or None.
    """

    row: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None

    def __bool__(self) -> bool:
        return self.row is not None or self.batch is not None

    @property
    def name(self) -> str:
        """Name of the Param with the last called function."""
        return "transformation_fn" if self.batch is None else "batch_transform_fn"

    def run(self, columns: Mapping[str, Array], *, is_training: bool) -> dict[str, Array]:
        """Transform the columns of at least one row to any names, shapes and dtypes.

        Raises:
            InvalidArgumentError: a function raised, or did not return a dict of rows' values; the message names it.
        """
        result = dict(columns)
        num_rows = len(next(iter(columns.values())))
        if self.row is not None:
            result = _row_by_row(self.row, result, num_rows, is_training)
        if self.batch is not None:
            keywords = _keywords(self.batch, is_training)
            returned = _called("batch_transform_fn", self.batch, result, keywords)
            result = _checked(returned, num_rows)
        return result

    def apply(
        self, columns: Mapping[str, Array], expected: Sequence[Column], *, is_training: bool
    ) -> dict[str, Array]:
        """Transform columns for model and loss, and check shapes and dtypes against `expected`.

        `expected` are the columns found by the driver.
        """
        if len(next(iter(columns.values()))) == 0:
            return {c.name: np.empty((0, *(c.shape or ())), np.dtype(c.dtype)) for c in expected}
        result = self.run(columns, is_training=is_training)
        return {c.name: self._as(c, result) for c in expected}

    def _as(self, column: Column, result: Mapping[str, Array]) -> Array:
        if column.name not in result:
            raise InvalidArgumentError(
                f"{self.name} returned no {column.name!r}; it returned {_names(result)}."
            )
        values = result[column.name]
        if values.shape[1:] != column.shape:
            raise InvalidArgumentError(
                f"{self.name} returned {column.name!r} with rows of shape {list(values.shape[1:])}, but the first rows "
                f"of the data had the shape {list(column.shape or ())}; every row must have the same shape."
            )
        dtype = np.dtype(column.dtype)
        if values.dtype == dtype:
            return np.ascontiguousarray(values)
        _check_numbers(self.name, column.name, values)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(dtype)
        if dtype.kind == "f" and np.isinf(cast).sum() > np.isinf(values).sum():
            raise InvalidArgumentError(
                f"{self.name} returned {column.name!r} with numbers that {column.tensor_dtype} cannot hold ({values.dtype}). Scale them, or "
                "choose another dtype."
            )
        if dtype.kind in "iub" and values.dtype.kind == "f" and not np.array_equal(cast, values):
            raise InvalidArgumentError(
                f"{self.name} returned {column.name!r} with numbers that are not whole ({values.dtype}), but the column "
                f"is used as {column.tensor_dtype}. Return whole numbers, or choose another dtype."
            )
        return cast


def _row_by_row(
    function: Callable[..., Any], columns: Mapping[str, Array], num_rows: int, training: bool
) -> dict[str, Array]:
    """Call a function for each row, and stack the results to a batch."""
    keywords = _keywords(function, training)
    rows: list[Mapping[str, Any]] = []
    for i in range(num_rows):
        values = {name: column[i] for name, column in columns.items()}
        row = _called("transformation_fn", function, values, keywords)
        if not isinstance(row, Mapping):
            hint = " To leave rows out, filter the DataFrame before fit." if row is None else ""
            raise InvalidArgumentError(
                f"transformation_fn returned {_kind(row)}; it must return a dict of the row's values.{hint}"
            )
        if rows and row.keys() != rows[0].keys():
            raise InvalidArgumentError(
                f"transformation_fn returned {_names(row)} for one row and {_names(rows[0])} for another; every "
                "row must have the same names."
            )
        rows.append(row)
    return {name: _stacked(name, [row[name] for row in rows]) for name in rows[0]}


def _checked(result: object, num_rows: int) -> dict[str, Array]:
    """Check the result of a batch function: a dict of arrays with one entry per row."""
    if not isinstance(result, Mapping):
        raise InvalidArgumentError(
            f"batch_transform_fn returned {_kind(result)}; it must return a dict from names to arrays of shape "
            "(rows, ...)."
        )
    arrays = {str(name): _as_array(values) for name, values in result.items()}
    for name, values in arrays.items():
        if values.ndim == 0 or len(values) != num_rows:
            raise InvalidArgumentError(
                f"batch_transform_fn returned {name!r} with shape {values.shape} for {num_rows} rows; every array "
                "must have one entry per row. To leave rows out, filter the DataFrame before fit."
            )
    return arrays


def resolve_transformations(row: Any, batch: Any) -> Transformations:
    """Check the functions of a fit on the driver.

    Raises:
        InvalidArgumentError: a function cannot be called with one argument.
    """
    for name, function, meaning in (
        ("transformation_fn", row, "a dict of a row's values"),
        ("batch_transform_fn", batch, "a dict of arrays"),
    ):
        if function is None:
            continue
        if not callable(function):
            raise InvalidArgumentError(f"{name} is {function!r:.100}; it must be a function.")
        try:
            inspect.signature(function).bind(None, **_keywords(function, True))
        except TypeError as e:
            raise InvalidArgumentError(
                f"{name} must take one argument, {meaning} (and optionally training=): {e}."
            ) from e
        except ValueError:  # a C function without a signature
            continue
    return Transformations(row, batch)


def transformed_by(
    functions: Transformations,
    source: Source,
    schema: DataSchema,
    decoders: RowFunctions,
    *,
    inputs: Mapping[str, str | Sequence[str]] | None,
    model_dtype: str,
) -> DataSchema:
    """Find the schema of transformed data from the first rows, on the driver.

    Random numbers of this process are unaffected. Raises the errors of `transformed_schema`.

    Args:
        functions: the user's functions.
        source: the rows.
        schema: schema of the data, with decoded columns.
        decoders: decoders that run before the functions.
        inputs: the param.
        model_dtype: dtype of the model's parameters.
    """
    split = schema.validation
    columns = [c for c in schema.columns if split is None or c.name != split.name]
    for column in columns:
        if column.is_collated or column.row_shape is None or column.kind in ("sparse", "ragged"):
            raise InvalidArgumentError(
                f"{functions.name} cannot be used with column {column.name!r}, because its rows are sparse, of different "
                "lengths or collated. Do both in a collate function, or make the rows dense and of equal length."
            )
    with _own_random_numbers():
        rows = source.examples(PROBED_ROWS)
        values = decoders.decode(columns, source.read([c.name for c in columns], rows))
        found = functions.run(values, is_training=True)
    return transformed_schema(functions, found, schema, inputs=inputs, model_dtype=model_dtype)


def transformed_schema(
    functions: Transformations,
    found: Mapping[str, Array],
    schema: DataSchema,
    *,
    inputs: Mapping[str, str | Sequence[str]] | None,
    model_dtype: str,
) -> DataSchema:
    """Make the schema of transformed columns, to bind the columns to the model's arguments and to the loss.

    Features have the names in `inputs`, or else the names of `feature_cols`. Labels and sample weight keep their names.
    Dtypes follow the rules for columns: floating values take the dtype of the model's parameters, and integers become
    int64; a dtype that the user chose for a column is kept.

    Args:
        functions: the user's functions, for messages.
        found: result of the functions for some rows.
        schema: schema of the materialized data.
        inputs: the param.
        model_dtype: dtype of the model's parameters.

    Raises:
        InvalidArgumentError: a name is missing, or its values are not numbers.
    """
    before = {c.name: c for c in schema.columns}

    def column(name: str, role: str) -> Column:
        if name not in found:
            raise InvalidArgumentError(
                f"{functions.name} returned no {name!r}, which {role} names; it returned {_names(found)}."
            )
        values = found[name]
        _check_numbers(functions.name, name, values)
        old = before.get(name)
        is_label = role == "label_cols"
        if old is not None and (old.is_explicit or (is_label and not old.is_floating)):
            tensor = old.tensor_dtype
        elif values.dtype.kind == "f":
            tensor = model_dtype
        else:
            tensor = "bool" if values.dtype.kind == "b" else "int64"
        shape = values.shape[1:]
        kind = "array" if shape else "scalar"
        explicit = old is not None and old.is_explicit
        return Column(name, kind, stored_dtype(tensor), shape, functions.name, tensor, explicit)

    if inputs is None:
        features = [column(c.name, "feature_cols") for c in schema.features]
    else:
        members = [
            m for given in inputs.values() for m in ([given] if isinstance(given, str) else given)
        ]
        features = [column(name, "inputs") for name in dict.fromkeys(members)]
    weight = schema.sample_weight
    return DataSchema(
        tuple(features),
        tuple(column(c.name, "label_cols") for c in schema.labels),
        column(weight.name, "sample_weight_col") if weight is not None else None,
    )


def bind_transformed(binding: InputBinding, schema: DataSchema) -> InputBinding:
    """Bind transformed fields to arguments. An argument of one field keeps the field's axes, as an image (B, C, H, W)."""
    shapes = {c.name: c.shape or () for c in schema.features}

    def shaped(argument: Any) -> Any:
        shape = shapes[argument.columns[0]]
        if len(argument.columns) > 1 or argument.shape is not None or len(shape) < 2:
            return argument
        return replace(argument, shape=tuple(shape), is_joined=False)

    return InputBinding(tuple(shaped(a) for a in binding.arguments))


def flat_columns(columns: Sequence[Column], given: Sequence[Column]) -> tuple[Column, ...]:
    """Convert transformed columns to their form in a DataFrame.

    Args:
        columns: columns after the transformation.
        given: columns of the DataFrame; a nested array whose shape did not change is kept.
    """
    nested = {c.name: c.shape for c in given if not c.has_decoder}
    return tuple(
        c
        if c.shape is None or len(c.shape) < 2 or nested.get(c.name) == c.shape
        else c.with_shape((math.prod(c.shape),))
        for c in columns
    )


def _called(name: str, function: Callable[..., Any], given: Any, keywords: dict[str, bool]) -> Any:
    try:
        return function(given, **keywords)
    except Exception as e:
        shapes = listed(f"{n} {np.shape(v)} {np.asarray(v).dtype}" for n, v in given.items())
        raise InvalidArgumentError(
            f"{name} raised {type(e).__name__}: {e} (it was given: {shapes})"
        ) from e


def _keywords(function: Callable[..., Any], training: bool) -> dict[str, bool]:
    """Return the keyword `training` for functions with an argument of this name, otherwise {}."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {"training": training} if "training" in parameters else {}


def _as_array(value: Any) -> Array:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _stacked(name: str, values: list[Any]) -> Array:
    arrays = [_as_array(value) for value in values]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        raise InvalidArgumentError(
            f"transformation_fn returned {name!r} with shape {list(arrays[0].shape)} for one row and "
            f"{list(next(s for s in shapes if s != arrays[0].shape))} for another; every row must have the same shape."
        )
    return np.stack(arrays)


def _check_numbers(function: str, name: str, values: Array) -> None:
    if values.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            f"{function} returned {name!r} as {_kind(values.flat[0] if values.size else values)}, which cannot become a "
            "tensor; return numbers or arrays of numbers."
        )


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _names(values: Mapping[str, Any]) -> str:
    return listed(map(repr, values)) or "an empty dict"


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
