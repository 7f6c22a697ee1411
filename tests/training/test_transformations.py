"""The user's functions between data and tensors: what they may do, and the errors for other results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkhvd.data.columns.binding import bind_inputs
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.user_code.transformations import (
    Transformations,
    bind_transformed,
    flat_columns,
    resolve_transformations,
    transformed_schema,
)

pytestmark = pytest.mark.pure

X = Column("x", "array", "float32", (4,), "array<double>", "float32")
N = Column("n", "scalar", "int64", (), "int", "int64")
Y = Column("y", "scalar", "float32", (), "double", "float32")
KIND = Column("kind", "scalar", "int64", (), "double", "int64")
SCHEMA = DataSchema((X, N), (Y,))


def columns(rows: int = 3) -> dict[str, Any]:
    return {
        "x": np.arange(rows * 4, dtype=np.float32).reshape(rows, 4),
        "n": np.arange(rows),
        "y": np.ones(rows, np.float32),
    }


def both(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": row["x"].reshape(2, 2) / 2, "y": row["y"] + row["n"]}


def test_row_function_runs_before_the_batch_function() -> None:
    functions = Transformations(both, lambda b: {**b, "image": b["image"][:, None] * 10})
    found = functions.run(columns(), is_training=True)
    assert list(found) == ["image", "y"]
    np.testing.assert_allclose(found["image"], columns()["x"].reshape(3, 1, 2, 2) * 5)
    np.testing.assert_allclose(found["y"], [1, 2, 3])


def test_transformation_with_a_training_argument_receives_it() -> None:
    def row(values: dict[str, Any], training: bool) -> dict[str, Any]:
        return {"x": values["x"] * (2 if training else 1)}

    def batch(values: dict[str, Any], *, training: bool = True) -> dict[str, Any]:
        return {"x": values["x"] + (100 if training else 0)}

    functions = resolve_transformations(row, batch)
    first = columns()["x"]
    np.testing.assert_array_equal(functions.run(columns(), is_training=True)["x"], first * 2 + 100)
    np.testing.assert_array_equal(functions.run(columns(), is_training=False)["x"], first)


def test_schema_follows_the_return_values_of_transformation_functions() -> None:
    def change(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "image": batch["x"].reshape(-1, 1, 2, 2).astype(np.float64),
            "flag": batch["n"] > 1,
            "ids": np.stack([batch["n"]] * 3, axis=1).astype(np.int16),
            "y": torch.from_numpy(batch["y"]),
            "other": np.array(["text"] * len(batch["y"])),
        }

    functions = Transformations(batch=change)
    inputs = {"input": ["image"], "ids": "ids", "flag": "flag"}
    schema = transformed_schema(
        functions,
        functions.run(columns(), is_training=True),
        SCHEMA,
        inputs=inputs,
        model_dtype="float32",
    )
    found = [(c.name, c.kind, c.dtype, c.shape, c.tensor_dtype) for c in schema.columns]
    assert found == [
        ("image", "array", "float32", (1, 2, 2), "float32"),
        ("ids", "array", "int64", (3,), "int64"),
        ("flag", "scalar", "uint8", (), "bool"),
        ("y", "scalar", "float32", (), "float32"),
    ]
    applied = functions.apply(columns(), schema.columns, is_training=True)
    assert {n: (v.shape, str(v.dtype)) for n, v in applied.items()} == {
        "image": ((3, 1, 2, 2), "float32"),
        "ids": ((3, 3), "int64"),
        "flag": ((3,), "uint8"),
        "y": ((3,), "float32"),
    }
    empty = functions.apply(columns(0), schema.columns, is_training=True)
    assert {n: v.shape for n, v in empty.items()} == {
        "image": (0, 1, 2, 2),
        "ids": (0, 3),
        "flag": (0,),
        "y": (0,),
    }
    assert [c.shape for c in flat_columns(schema.features, ())] == [(4,), (3,), ()]
    assert flat_columns(schema.features, schema.features) == tuple(schema.features)


def test_multidimensional_field_keeps_its_shape_as_an_argument() -> None:
    schema = DataSchema((X.with_shape((1, 2, 2)),), (Y,))
    binding = bind_transformed(bind_inputs(nn.Conv2d(1, 1, 2), schema), schema)
    (image,), _ = binding.apply({"x": np.zeros((5, 1, 2, 2), np.float32)})
    assert image.shape == (5, 1, 2, 2)
    # As in the DataFrame of `transform`.
    (image,), _ = binding.apply({"x": np.zeros((5, 4), np.float32)})
    assert image.shape == (5, 1, 2, 2)


def test_returned_class_labels_must_be_whole_numbers() -> None:
    schema = DataSchema((X,), (KIND,))
    functions = Transformations(row=lambda row: {**row, "kind": row["kind"] * 1.0})
    given = {"x": columns()["x"], "kind": np.array([0, 1, 2])}
    found = functions.run(given, is_training=True)
    made = transformed_schema(functions, found, schema, inputs=None, model_dtype="float32")
    assert made.labels[0].tensor_dtype == "int64"
    assert functions.apply(given, made.columns, is_training=True)["kind"].dtype == np.int64
    halves = Transformations(row=lambda row: {**row, "kind": row["kind"] * 0.5})
    with pytest.raises(
        InvalidArgumentError,
        match="transformation_fn returned 'kind' with numbers that are not whole",
    ):
        halves.apply(given, made.columns, is_training=True)


def test_returned_numbers_that_overflow_the_models_dtype_raise() -> None:
    functions = Transformations(row=lambda row: {"x": row["x"], "y": row["y"] * 1e300})
    given = {"x": columns()["x"], "y": np.ones(3)}
    with pytest.raises(
        InvalidArgumentError,
        match=r"transformation_fn returned 'y' with numbers that float32 cannot hold \(float64\)",
    ):
        functions.apply(given, (X, Y), is_training=True)


def varying(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"][: int(row["n"]) + 1]}


@pytest.mark.parametrize(
    ("row", "batch", "message"),
    [
        (
            lambda row: None,
            None,
            "transformation_fn returned None; it must return a dict of the row's values. To leave rows out, filter the "
            "DataFrame before fit.",
        ),
        (
            lambda row: {**row, f"k{row['n']}": 1},
            None,
            "transformation_fn returned 'x', 'n', 'y', 'k1' for one row and 'x', 'n', 'y', 'k0' for another; every row "
            "must have the same names.",
        ),
        (
            varying,
            None,
            "transformation_fn returned 'x' with shape [1] for one row and [2] for another; every row must have the "
            "same shape.",
        ),
        (
            lambda row: row["z"],
            None,
            "transformation_fn raised KeyError: 'z' (it was given: x (4,) float32, n () int64, y () float32)",
        ),
        (
            None,
            lambda batch: [1],
            "batch_transform_fn returned list; it must return a dict from names to arrays of shape (rows, ...).",
        ),
        (
            None,
            lambda batch: {"x": batch["x"][:1]},
            "batch_transform_fn returned 'x' with shape (1, 4) for 2 rows; every array must have one entry per row. To "
            "leave rows out, filter the DataFrame before fit.",
        ),
        (
            None,
            lambda batch: {"y": batch["y"], "n": batch["n"]},
            "batch_transform_fn returned no 'x', which feature_cols names; it returned 'y', 'n'.",
        ),
        (
            lambda row: {**row, "x": "text"},
            None,
            "transformation_fn returned 'x' as str_, which cannot become a tensor; return numbers or arrays of numbers.",
        ),
    ],
)
def test_error_names_invalid_transformation_results(row: Any, batch: Any, message: str) -> None:
    functions = Transformations(row, batch)
    with pytest.raises(InvalidArgumentError) as raised:
        transformed_schema(
            functions,
            functions.run(columns(2), is_training=True),
            SCHEMA,
            inputs=None,
            model_dtype="float32",
        )
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("row", "batch", "message"),
    [
        (3, None, "transformation_fn is 3; it must be a function."),
        (
            lambda: 1,
            None,
            "transformation_fn must take one argument, a dict of a row's values (and optionally training=): "
            "too many positional arguments.",
        ),
        (
            None,
            lambda a, b: 1,
            "batch_transform_fn must take one argument, a dict of arrays (and optionally training=): missing "
            "a required argument: 'b'.",
        ),
    ],
)
def test_functions_with_a_wrong_signature_are_refused(row: Any, batch: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        resolve_transformations(row, batch)
