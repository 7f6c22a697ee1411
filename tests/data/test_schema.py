from __future__ import annotations

import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T  # noqa: N812 - Spark's own custom

from sparkhvd.data.columns.check import check_schema
from sparkhvd.data.columns.schema import DataSchema, dtype_name
from sparkhvd.data.dataset import prepare
from sparkhvd.errors import InvalidArgumentError

pytestmark = pytest.mark.pure

FIELDS = {
    "flag": T.BooleanType(),
    "byte": T.ByteType(),
    "short": T.ShortType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "ints": T.ArrayType(T.IntegerType()),
    "doubles": T.ArrayType(T.DoubleType()),
    "vector": VectorUDT(),
    "text": T.StringType(),
    "price": T.DecimalType(10, 2),
    "when": T.TimestampType(),
    "map": T.MapType(T.StringType(), T.DoubleType()),
    "pair": T.StructType([T.StructField("a", T.DoubleType())]),
    "nested": T.ArrayType(T.ArrayType(T.DoubleType())),
    "raw": T.BinaryType(),
    "names": T.ArrayType(T.StringType()),
    "day": T.DateType(),
    "prices": T.ArrayType(T.DecimalType(10, 2)),
    "label": T.LongType(),
}
SCHEMA = T.StructType([T.StructField(n, t) for n, t in FIELDS.items()])


def check(features: list[str], **options: Any) -> DataSchema:
    options.setdefault("label_cols", ["label"])
    return check_schema(SCHEMA, feature_cols=features, **options)


@pytest.mark.parametrize(
    ("name", "kind", "stored", "tensor"),
    [
        ("flag", "scalar", "uint8", "bool"),
        ("byte", "scalar", "int64", "int64"),
        ("short", "scalar", "int64", "int64"),
        ("int", "scalar", "int64", "int64"),
        ("long", "scalar", "int64", "int64"),
        ("float", "scalar", "float32", "float32"),
        ("double", "scalar", "float32", "float32"),
        ("ints", "array", "int64", "int64"),
        ("doubles", "array", "float32", "float32"),
        ("vector", "vector", "float32", "float32"),
    ],
)
def test_every_spark_type_maps_to_a_stored_and_a_tensor_dtype(
    name: str, kind: str, stored: str, tensor: str
) -> None:
    column = check([name]).features[0]
    assert (column.kind, column.dtype, column.tensor_dtype) == (kind, stored, tensor)
    assert column.shape == (() if kind == "scalar" else None)


@pytest.mark.parametrize(
    ("model", "stored"), [("float64", "float64"), ("float16", "float16"), ("bfloat16", "float32")]
)
def test_float_columns_take_the_dtype_of_the_model(model: str, stored: str) -> None:
    column = check(["double"], model_dtype=model).features[0]
    assert (column.dtype, column.tensor_dtype) == (stored, model)


@pytest.mark.parametrize("model", ["float32", "bfloat16", "float64"])
def test_numbers_keep_their_spark_types_for_transformation_functions(model: str) -> None:
    names = {
        **{"flag": "bool", "byte": "int8", "short": "int16", "int": "int32", "long": "int64"},
        **{"float": "float32", "double": "float64", "price": "float64", "ints": "int32"},
        **{"doubles": "float64", "vector": "float64", "nested": "float64", "prices": "float64"},
    }
    options = {"model_dtype": model, "keeps_types": True, "class_labels": ["label"]}
    schema = check([*names], **options)
    assert {c.name: c.dtype for c in schema.features} == names
    assert schema.labels[0].dtype == "int64"
    # The model takes the same as without the function, but numbers need not fit before it.
    plain = check([*names], model_dtype=model)
    assert [c.for_model() for c in schema.features] == list(plain.features)
    raw = check(["raw"], decoders=["raw"], keeps_types=True).features[0]
    assert raw.for_model() is raw
    assert [c.tensor_dtype for c in schema.columns] == [c.tensor_dtype for c in plain.columns]
    assert [c.number_type for c in schema.features if c.dtype == "float64"] == ["float64"] * 6
    # The user's dtype has priority.
    chosen = check(["int"], feature_dtypes={"int": "float32"}, keeps_types=True).features[0]
    assert chosen.dtype == "float32"
    weighted = check(["int"], sample_weight_col="double", model_dtype=model, keeps_types=True)
    assert weighted.sample_weight is not None
    assert weighted.sample_weight.dtype == "float64"
    assert weighted.sample_weight.tensor_dtype == model
    filled = check(["flag"], handle_invalid={"flag": 1}, keeps_types=True).features[0]
    assert filled.invalid == ("fill", 1)


def test_dtypes_can_be_overridden_by_name_or_position() -> None:
    by_name = check(["int", "double"], feature_dtypes={"int": torch.float32})
    by_position = check(["int", "double"], feature_dtypes=["float32", None])
    assert by_name == by_position
    assert [c.dtype for c in by_name.features] == ["float32", "float32"]
    assert [c.is_explicit for c in by_name.features] == [True, False]
    assert check(["int"], label_dtypes={"label": "float64"}).labels[0].dtype == "float64"


def test_missing_column_error_lists_similar_and_all_names() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check(["vectr"])
    assert str(caught.value) == (
        "feature_cols[0] names column 'vectr', which the DataFrame does not have. "
        "Did you mean 'vector'? Its columns are: " + ", ".join(repr(n) for n in FIELDS) + "."
    )
    with pytest.raises(InvalidArgumentError, match="Did you mean 'vector'"):
        check(["VECTOR"])


def test_missing_default_column_error_explains_how_to_name_or_create_it() -> None:
    with pytest.raises(InvalidArgumentError, match=r"does not have. Give feature_cols=\[...\], or"):
        check(["features"])
    columns = T.StructType([T.StructField("x", T.DoubleType())])
    with pytest.raises(InvalidArgumentError, match=r"'label', .* Give label_cols=\[...\]. Its col"):
        check_schema(columns, feature_cols=["x"], label_cols=["label"])


def test_struct_field_error_shows_the_select_that_creates_a_column() -> None:
    inner = T.StructType([T.StructField("a", T.DoubleType())])
    schema = T.StructType([T.StructField("s", inner), T.StructField("y", T.DoubleType())])
    with pytest.raises(
        InvalidArgumentError, match=r"'s' is a struct: .*df\.select\('\*', 's\.\*'\)"
    ):
        check_schema(schema, feature_cols=["s.a"], label_cols=["y"])


@pytest.mark.parametrize(
    ("name", "source", "remedy"),
    [
        ("text", "string", "StringIndexer"),
        ("when", "timestamp", "unix_timestamp"),
        ("day", "date", "unix_timestamp"),
        ("map", "map<string,double>", "Turn it into numbers"),
        ("pair", "struct<a:double>", "Select its fields"),
        ("raw", "binary", "Give decoders={'raw': function from bytes"),
        ("names", "array<string>", "An array must hold numbers, or arrays of numbers."),
    ],
)
def test_error_names_an_unsupported_type_and_a_remedy(name: str, source: str, remedy: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check(["double", name])
    message = str(caught.value)
    assert message.startswith(
        f"feature_cols[1] names column {name!r} of type {source}, which cannot become a tensor. "
        "Supported are: boolean, tinyint"
    )
    assert remedy in message


def test_column_may_be_feature_and_label_with_equal_storage() -> None:
    schema = check(["label", "double"])
    assert [c.name for c in schema.features] == ["label", "double"]
    assert schema.labels == (schema.features[0],)
    assert [c.name for c in schema.columns] == ["label", "double"]
    assert schema.with_shapes({"label": (), "double": ()}).labels[0].shape == ()
    with pytest.raises(
        InvalidArgumentError,
        match=r"'label' is given as feature_cols\[0\] and as label_cols\[0\], which would store it as \w+ and as float64. Copy it",
    ):
        check(["label"], label_dtypes={"label": "float64"})


def test_column_with_two_roles_raises() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"'int' is given as feature_cols\[0\] and as feature_cols\[1\]"
    ):
        check(["int", "int"])
    with pytest.raises(InvalidArgumentError, match="and as sample_weight_col"):
        check(["double"], sample_weight_col="double")


def test_selected_column_with_duplicate_name_raises() -> None:
    twice = T.StructType([*SCHEMA.fields, T.StructField("int", T.LongType())])
    with pytest.raises(InvalidArgumentError, match="'int', which the DataFrame has 2 times"):
        check_schema(twice, feature_cols=["int"], label_cols=["label"])
    assert (
        check_schema(twice, feature_cols=["long"], label_cols=["label"]).features[0].name == "long"
    )


@pytest.mark.parametrize("features", ["vector", [], None, [1], [""]])
def test_feature_cols_must_be_a_list_of_names(features: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="feature_cols"):
        check(features)


def test_validation_column_becomes_a_flag() -> None:
    schema = check(["vector"], validation="int", sample_weight_col="double")
    assert schema.validation is not None
    assert (schema.validation.dtype, schema.validation.tensor_dtype) == ("uint8", "bool")
    assert schema.sample_weight is not None
    assert schema.sample_weight.dtype == "float32"
    assert [c.name for c in schema.columns] == ["vector", "label", "double", "int"]
    with pytest.raises(InvalidArgumentError, match="must hold one number per row"):
        check(["vector"], validation="doubles")


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, True])
def test_validation_fraction_is_checked(fraction: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="validation is"):
        check(["vector"], validation=fraction)
    assert check(["vector"], validation=0.2).validation is None


def test_invalid_dtype_overrides_raise() -> None:
    with pytest.raises(InvalidArgumentError, match="feature_dtypes names column 'nope'"):
        check(["int"], feature_dtypes={"nope": "float32"})
    with pytest.raises(InvalidArgumentError, match="a list of 1 entries"):
        check(["int"], feature_dtypes=["float32", "float32"])
    with pytest.raises(InvalidArgumentError, match="'complex64' is not a dtype"):
        check(["int"], feature_dtypes={"int": "complex64"})


def test_dtype_name_accepts_text_torch_and_numpy_dtypes() -> None:
    assert dtype_name("double") == dtype_name(torch.float64) == dtype_name(np.float64) == "float64"
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_schema_survives_json_and_pickle() -> None:
    schema = check(["vector", "int"], validation="flag", sample_weight_col="double")
    shaped = schema.with_shapes(
        {c.name: c.shape or (3,) if c.kind != "scalar" else () for c in schema.columns}
    )
    for one in (schema, shaped):
        assert DataSchema.from_json(one.to_json()) == one
        assert pickle.loads(pickle.dumps(one)) == one
    assert shaped.row_bytes == 3 * 4 + 8 + 8 + 4 + 1
    with pytest.raises(InvalidArgumentError, match="only after the data have been materialized"):
        _ = schema.row_bytes
    with pytest.raises(InvalidArgumentError, match="'nope' is not part of the data"):
        schema.column("nope")


def test_decimals_and_nested_arrays_become_float_columns() -> None:
    columns = check(["price", "prices", "nested"]).features
    assert [(c.kind, c.dtype) for c in columns] == [
        ("scalar", "float32"),
        ("array", "float32"),
        ("array", "float32"),
    ]


def test_decoders_and_collate_functions_allow_rows_of_different_shapes() -> None:
    given = check(
        ["raw", "text", "ints", "nested"],
        decoders=["raw", "text", "nested"],
        collated=["ints", "text"],
        feature_dtypes={"text": "int32"},
    )
    found = [
        (c.kind, c.dtype, c.tensor_dtype, c.has_decoder, c.is_collated) for c in given.features
    ]
    assert found == [
        ("binary", "uint8", "float32", True, False),
        ("string", "uint8", "int32", True, True),
        ("ragged", "int64", "int64", False, True),
        ("ragged", "float32", "float32", True, False),
    ]
    assert DataSchema.from_json(given.to_json()) == given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"decoders": ["z"]},
            "decoders names column 'z', which is not among 'double', 'text', 'label'.",
        ),
        (
            {"collated": ["z"]},
            "collate_fn names column 'z', which is not among 'double', 'text', 'label'.",
        ),
        (
            {"decoders": ["double"]},
            "decoders names column 'double' of type double. It takes only binary columns, string columns and arrays of numbers.",
        ),
        (
            {"decoders": ["text"], "sparse_cols": ["text"]},
            "sparse_cols names column 'text' of type string; only Spark ML vectors can be kept sparse.",
        ),
        (
            {"sparse_cols": ["label"]},
            "sparse_cols names column 'label', which is not among 'double', 'text'.",
        ),
        (
            {"handle_invalid": "kept"},
            "handle_invalid is 'kept'. Give 'error', 'skip' (leave out rows with a null, NaN, infinity or a number that "
            "the tensor cannot hold), 'keep' (NaN and infinity unchanged, a null as NaN), or a dict from columns to these words or to a "
            "number that replaces nulls and invalid numbers.",
        ),
        (
            {"handle_invalid": {"label": "keep"}, "decoders": ["text"]},
            "handle_invalid keeps NaN in column 'label' of type bigint, which is stored as int64 and so cannot hold NaN. "
            "Choose a floating type with feature_dtypes or label_dtypes, or give 'skip' or a number.",
        ),
        (
            {"handle_invalid": {"text": "keep"}, "decoders": ["text"]},
            "handle_invalid keeps NaN in column 'text' of type string, whose bytes and strings are never NaN",
        ),
        (
            {
                "handle_invalid": {"float": "keep"},
                "decoders": ["text"],
                "sample_weight_col": "float",
            },
            "handle_invalid keeps NaN in column 'float' of type float, which is sample_weight_col and needs a number",
        ),
        (
            {"handle_invalid": {"double": "x"}},
            "handle_invalid is {'double': 'x'}. Give 'error', 'skip' (leave out",
        ),
        (
            {"handle_invalid": {"z": 0}},
            "handle_invalid names column 'z', which is not among 'double', 'text', 'label'.",
        ),
        (
            {"handle_invalid": {"double": math.nan}},
            "handle_invalid fills column 'double' of type double with nan, but handle_invalid also replaces NaN.",
        ),
        (
            {"handle_invalid": {"double": 1e300}},
            "handle_invalid fills column 'double' of type double with 1e+300, which float32 cannot hold. Give another "
            "number, or another type with feature_dtypes or label_dtypes.",
        ),
        (
            {"handle_invalid": {"double": 10**400}},
            "handle_invalid fills column 'double' of type double with 1000",
        ),
        (
            {"handle_invalid": {"label": 0.5}, "decoders": ["text"]},
            "handle_invalid fills column 'label' of type bigint with 0.5, which int64 cannot hold.",
        ),
        (
            {"handle_invalid": {"double": 256}, "feature_dtypes": {"double": "uint8"}},
            "handle_invalid fills column 'double' of type double with 256, which uint8 cannot hold.",
        ),
        (
            {"handle_invalid": {"double": 2}, "feature_dtypes": {"double": "bool"}},
            "handle_invalid fills column 'double' of type double with 2, which bool cannot hold.",
        ),
        (
            {"handle_invalid": {"double": math.inf}, "feature_dtypes": {"double": "int64"}},
            "handle_invalid fills column 'double' of type double with inf, which int64 cannot hold.",
        ),
        (
            {"handle_invalid": {"text": 0}, "decoders": ["text"]},
            "handle_invalid fills column 'text' of type string with 0. Bytes and strings cannot be filled with a number",
        ),
    ],
)
def test_invalid_params_by_column_raise_a_clear_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check(["double", "text"], **options)
    assert str(caught.value).startswith(message)


def test_handle_invalid_can_differ_by_column() -> None:
    columns = check(["double", "int"], handle_invalid={"int": 3, "label": "skip"}).columns
    assert [c.invalid for c in columns] == [("error",), ("fill", 3), ("skip",)]
    for value in (1e300, math.inf, True, 0):
        (column, _) = check(
            ["double"], handle_invalid={"double": value}, feature_dtypes={"double": "float64"}
        ).columns
        assert column.invalid == ("fill", value)
    # A validation column decides where a row goes: a null there is an error in any case.
    columns = check(["int"], validation="double", handle_invalid="skip").columns
    assert [c.invalid for c in columns] == [("skip",), ("skip",), ("error",)]


def test_nan_is_kept_only_in_float_columns() -> None:
    keep = {"double": "keep", "label": "keep"}
    columns = check(["double", "int"], handle_invalid=keep, label_dtypes={"label": "float64"})
    assert [c.invalid for c in columns.columns] == [("keep",), ("error",), ("keep",)]
    # For all columns, it applies to columns of floats, but not to weights.
    names = ["double", "int", "doubles", "vector", "flag", "text"]
    every = check(
        names, handle_invalid="keep", decoders=["text"], sample_weight_col="float"
    ).columns
    assert [c.name for c in every if c.invalid == ("keep",)] == ["double", "doubles", "vector"]
    # A function of rows gets the double.
    raw = check(["double"], keeps_types=True, handle_invalid="keep", class_labels=["label"])
    assert [c.invalid for c in raw.columns] == [("keep",), ("error",)]


def test_errors_of_prepare_name_arguments_of_prepare(tmp_path: Path) -> None:
    df: Any = SimpleNamespace(columns=list(FIELDS), schema=SCHEMA, sparkSession=None)
    says = "column 'text' is of type string, which cannot become a tensor. Name it in decoded="
    with pytest.raises(InvalidArgumentError, match=says):
        prepare(df, tmp_path, columns=["double", "text"])
    with pytest.raises(
        InvalidArgumentError, match=r"^columns\[1\] names column 'day' of type date"
    ):
        prepare(df, tmp_path, columns=["text", "day"], decoded=["text"])
