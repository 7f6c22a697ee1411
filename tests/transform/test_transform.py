"""`TorchModel.transform`: types, values, other columns, large weights and no job at plan time."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.feature import IndexToString, StringIndexer, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from torch import nn

from sparkhvd import InvalidArgumentError, TorchModel
from sparkhvd.data.arrow_types import plain_names
from tests.estimator.fits import fitted, mlp

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

# One unit in the last place of float32 numbers about 1: the order in which a matrix product adds depends on the
# processor and on the number of rows at once, and shows if a sum is near 0.
ROUNDING = 1.2e-7


def rows_of(df: DataFrame, module: nn.Module, *, rows: int) -> tuple[list[Any], torch.Tensor]:
    found = df.collect()
    assert len(found) == rows
    x = torch.tensor(np.array([r.x.toArray() for r in found]), dtype=torch.float32)
    with torch.no_grad():
        return found, module(x).double()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    schema = StructType(
        [
            StructField("x", VectorUDT(), nullable=False, metadata={"ml_attr": {"num_attrs": 2}}),
            StructField("k", IntegerType(), nullable=False),
            StructField("s", StringType()),
            StructField("t", TimestampType()),
            StructField("m", MapType(StringType(), ArrayType(DoubleType()))),
            StructField("v", VectorUDT(), metadata={"a": 1}),
        ]
    )
    now = datetime.datetime(2024, 3, 31, 1, 30)
    rows = [
        (
            DenseVector([i / 7, -i / 3]) if i % 2 else SparseVector(2, [1], [float(i)]),
            i,
            None if i % 5 == 0 else f"é{i}",
            now + datetime.timedelta(hours=i),
            {"a": [1.0, float(i)]},
            None if i % 4 == 0 else SparseVector(5, [i % 5], [1.0]),
        )
        for i in range(30)
    ]
    return spark.createDataFrame(rows, schema)  # in two partitions: each costs a Python worker


def test_transform_adds_outputs_and_keeps_other_columns(df: DataFrame) -> None:
    module = mlp(2)
    out = fitted(module).transform(df)
    assert out.schema.fields[:-1] == df.schema.fields  # types, nullability and metadata
    assert out.schema.fields[-1] == StructField("y__output", DoubleType(), nullable=False)
    found, expected = rows_of(out, module, rows=30)
    np.testing.assert_allclose(
        [r.y__output for r in found], expected[:, 0], rtol=1e-6, atol=ROUNDING
    )
    before = {r.k: r for r in df.collect()}
    for row in found:
        assert row[:-1] == before[row.k]


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
@pytest.mark.parametrize("width", [1, 3])
def test_spark_ml_columns_have_their_types_and_meaning(
    df: DataFrame, link: str, width: int
) -> None:
    module = mlp(2, width)
    model = fitted(module, link, width).setPredictionCol("prediction").setRawPredictionCol("raw")
    if link != "identity":
        model.setProbabilityCol("p")
    out = model.transform(df.select("x"))
    kinds = {f.name: f.dataType for f in out.schema.fields}
    assert isinstance(kinds["y__output"], DoubleType if width == 1 else VectorUDT)
    assert isinstance(kinds["prediction"], DoubleType)
    assert isinstance(kinds["raw"], VectorUDT)
    # Later stages know widths and classes without reading rows.
    classes = 2 if (link, width) == ("sigmoid", 1) else width
    attributes = {f.name: f.metadata.get("ml_attr") for f in out.schema.fields}
    assert attributes["raw"] == {"num_attrs": classes}
    assert attributes["prediction"] == (
        {"type": "nominal", "num_vals": classes} if classes > 1 else None
    )
    assert attributes.get("p") == ({"num_attrs": classes} if link != "identity" else None)
    assert attributes["y__output"] == ({"num_attrs": 3} if width == 3 else None)
    found, z = rows_of(out, module, rows=30)
    raw = np.array([r.raw.toArray() for r in found])
    prediction = np.array([r.prediction for r in found])
    if width == 3:
        np.testing.assert_array_equal(prediction, z.argmax(1))
        np.testing.assert_allclose(raw, z, rtol=1e-6, atol=ROUNDING)
    elif link == "sigmoid":
        np.testing.assert_array_equal(prediction, (z[:, 0] > 0).double())
        np.testing.assert_allclose(raw, torch.cat([-z, z], 1), rtol=1e-6, atol=ROUNDING)
    else:
        np.testing.assert_allclose(prediction, z[:, 0], rtol=1e-6, atol=ROUNDING)
    if link == "softmax":
        p = np.array([r.p.toArray() for r in found])
        np.testing.assert_allclose(p, torch.softmax(z, 1), rtol=1e-5)
    if link == "sigmoid":
        p = np.array([r.p.toArray() for r in found])
        s = torch.sigmoid(z)
        expected = torch.cat([1 - s, s], 1) if width == 1 else s
        np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_output_function_defines_probabilities(df: DataFrame) -> None:
    module = mlp(2, 3)
    model = fitted(module, width=3).setOutputFn(lambda z: torch.softmax(-z, 1))
    model.setProbabilityCol("p").setPredictionCol("prediction").setOutputCols([""])
    found, z = rows_of(model.transform(df.select("x")), module, rows=30)
    assert found[0].__fields__ == ["x", "p", "prediction"]
    np.testing.assert_array_equal([r.prediction for r in found], (-z).argmax(1))


def test_empty_data_and_array_columns_are_transformed(spark: SparkSession, df: DataFrame) -> None:
    model = fitted(mlp(2))
    assert model.transform(df.limit(0)).collect() == []
    assert model.transform(df.where("k < 0")).count() == 0
    from pyspark.ml.functions import vector_to_array

    arrays = df.select(vector_to_array("x").alias("z"), "k")
    as_vectors = {r.k: r.y__output for r in model.transform(df).collect()}
    renamed = model.copy().setFeatureCols(["z"]).transform(arrays)
    # How rows are batched may change the last bit.
    assert {r.k: r.y__output for r in renamed.collect()} == pytest.approx(as_vectors, rel=1e-5)
    # Spark may leave the added column out, but not the model's input.
    assert model.transform(df).select("k").count() == 30


def test_column_names_with_dots_and_duplicates_are_allowed(df: DataFrame) -> None:
    model = fitted(mlp(2).eval())
    odd = df.selectExpr("x", "1 AS `a.b`", "2 AS twice", "3 AS twice")
    found = model.transform(odd)
    assert found.columns == ["x", "a.b", "twice", "twice", "y__output"]
    assert tuple(found.first())[1:4] == (1, 2, 3)
    renamed = df.selectExpr("x AS `x.y`")
    assert model.copy().setFeatureCols(["x.y"]).transform(renamed).count() == df.count()


def test_plain_columns_are_sent_under_their_own_names(spark: SparkSession) -> None:
    net = nn.Linear(2, 1)
    model = TorchModel(model=net, feature_cols=["select", "place"], label_cols=["from"])
    names = ["select", "place", "Order", "_x1"]
    df = spark.range(20).selectExpr(
        "float(id) AS `select`", "float(id % 3) AS place", "string(id) AS Order", "id AS _x1"
    )
    assert plain_names(names, [False] * 4) == names
    rows = model.transform(df).collect()
    assert list(rows[0].asDict()) == [*names, "from__output"]
    with torch.no_grad():
        expected = net(torch.tensor([[row["select"], row.place] for row in rows]))[:, 0]
    np.testing.assert_allclose([row["from__output"] for row in rows], expected, rtol=1e-6)
    assert [(row.Order, row._x1) for row in rows] == [(str(i), i) for i in range(20)]
    assert model.transform(df).filter("place = 1").count() == 7


@pytest.mark.parametrize(
    ("names", "is_vector"),
    [
        (["a", "A"], [False] * 2),
        (["a.b"], [False]),
        (["a", "a"], [False] * 2),
        (["a b"], [False]),
        (["v"], [True]),
        (["\u00e4"], [False]),
    ],
)
def test_other_columns_are_sent_under_numbered_names(
    names: list[str], is_vector: list[bool]
) -> None:
    assert plain_names(names, is_vector) == [f"c{i}" for i in range(len(names))]


def test_returned_module_is_a_copy_in_eval_mode(df: DataFrame) -> None:
    model = fitted(mlp(2))
    module = model.getModel()
    assert not module.training
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert model.transform(df).first().y__output != 0.0


def test_later_stages_find_the_metadata_that_they_need(spark: SparkSession) -> None:
    rows = [(label, i / 3) for i, label in enumerate("abcabcaab")]
    df = spark.createDataFrame(rows, "s string, n double")
    indexed = StringIndexer(inputCol="s", outputCol="i").fit(df).transform(df)
    given = VectorAssembler(inputCols=["i", "n"], outputCol="x").transform(indexed)
    out = fitted(mlp(2)).transform(given)
    assert out.schema.fields[:-1] == given.schema.fields
    (nominal,) = out.schema["x"].metadata["ml_attr"]["attrs"]["nominal"]
    assert nominal == {"vals": ["a", "b", "c"], "idx": 0, "name": "i"}
    back = IndexToString(inputCol="i", outputCol="back").transform(out)
    later = VectorAssembler(inputCols=["y__output", "x"], outputCol="all").transform(back)
    assert later.schema["all"].metadata["ml_attr"]["attrs"]["nominal"][0]["vals"] == ["a", "b", "c"]
    for row in later.collect():
        assert row.back == row.s
        assert row["all"].toArray().tolist() == [row.y__output, row.i, row.n]


def test_error_names_unusable_columns_before_a_job(df: DataFrame) -> None:
    model = fitted(mlp(2))
    metadata = {"ml_attr": {"num_attrs": 3}}
    wide = df.select(F.col("x").alias("x", metadata=metadata))
    for bad, message in (
        (
            df.withColumnRenamed("x", "X1"),
            "feature_cols[0] names column 'x', which the DataFrame does not have. Its columns are: 'X1', 'k', 's', "
            "'t', 'm', 'v'.",
        ),
        (
            df.withColumn("x", F.col("k")),
            "transform: column 'x' is of type int, but the model was trained with vector.",
        ),
        (
            wide,
            "transform: column 'x' has 3 elements per row according to its metadata, but the model takes 2.",
        ),
    ):
        with pytest.raises(InvalidArgumentError) as wrong:
            model.transform(bad)
        assert str(wrong.value) == message
    with pytest.raises(InvalidArgumentError, match="names column 'x' of type string, which cannot"):
        model.transform(df.withColumn("x", F.col("s")))
    # Only the rows show how long an array is.
    with pytest.raises(
        Exception, match="column 'x' has 3 elements per row in a batch, but the model takes"
    ):
        model.transform(df.select(F.array(*[F.lit(1.0)] * 3).alias("x"))).collect()


def test_column_names_are_compared_like_in_spark(df: DataFrame) -> None:
    taken = df.withColumnRenamed("k", "Y__OUTPUT")
    model = fitted(mlp(2))
    with pytest.raises(InvalidArgumentError) as wrong:
        model.transform(taken)
    assert str(wrong.value) == (
        "transform would add column 'y__output', which exists already as 'Y__OUTPUT'. Drop the existing column, set another "
        "name, or omit the output: outputCols with '' at its position."
    )
    with pytest.raises(InvalidArgumentError, match="add column 'Y__Output', which exists already"):
        model.copy().setPredictionCol("Y__Output").transform(df)
    try:
        df.sparkSession.conf.set("spark.sql.caseSensitive", "true")
        assert model.transform(taken).columns[-1] == "y__output"
    finally:
        df.sparkSession.conf.unset("spark.sql.caseSensitive")


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("make_interval(1)", "interval"),
        ("INTERVAL '1' MONTH", "interval month"),
        ("NULL", "void"),
        ("array(NULL)", "array<void>"),
        ("map('a', struct(make_interval(1) AS b))", "map<string,struct<b:interval>>"),
        ("parse_json('1')", "variant"),
    ],
)
def test_error_names_columns_that_cannot_pass_through_python(
    df: DataFrame, expression: str, kind: str
) -> None:
    if kind == "variant" and df.sparkSession.version < "4":
        pytest.skip("Spark 3 has no variants")
    with pytest.raises(InvalidArgumentError) as wrong:
        fitted(mlp(2)).transform(df.withColumn("odd", F.expr(expression)))
    assert str(wrong.value) == (
        f"transform: column 'odd' is of type {kind}, which Spark cannot send through a Python function. Drop it first, "
        "or cast it (for example to string) and back."
    )


def test_columns_of_other_types_are_unchanged(df: DataFrame) -> None:
    more = df.limit(3).selectExpr(
        "x",
        "INTERVAL '1' DAY AS a",
        "date'2024-01-01' AS b",
        "struct(array(1Y)) AS c",
        "X'00' AS d",
    )
    assert fitted(mlp(2)).transform(more).drop("y__output").collect() == more.collect()


def test_fill_values_follow_a_renamed_column(df: DataFrame) -> None:
    holes = df.selectExpr("array(1.0D, if(k < 3, NULL, 2.0D)) AS z")
    model = fitted(mlp(2)).setFeatureCols(["z"]).setHandleInvalid({"x": 2.0})
    assert len({row.y__output for row in model.transform(holes).collect()}) == 1
    # A name in this DataFrame has priority over a name in the training data.
    model.setHandleInvalid({"x": 2.0, "z": 5.0})
    assert len({row.y__output for row in model.transform(holes).collect()}) == 2


def test_error_names_a_decoder_before_a_transformation(df: DataFrame) -> None:
    model = fitted(mlp(2)).setDecoders({"x": len})
    (column,) = model._fitted.columns
    transformed = replace(column, kind="array", source="transformation_fn")
    model._fitted = replace(model._fitted, columns=(transformed,))
    with pytest.raises(InvalidArgumentError) as wrong:
        model.transform(df.selectExpr("X'00' AS x"))
    assert str(wrong.value) == (
        "transform: column 'x' is of type binary. In training transformation_fn changed the result of decoders['x'], but "
        "transform calls no transformations. Give a column of numbers as the model gets them: [2] per row, float32."
    )
    assert model.transform(df.selectExpr("array(1.0D, 2.0D) AS x").limit(2)).count() == 2


def test_unfitted_modules_transform_in_a_saved_pipeline(df: DataFrame, tmp_path: Path) -> None:
    """One Pipeline has numbers, vectors, arrays and decoders, and is compared before and after a save."""
    numbers, vectors, table = mlp(2, 2), mlp(2), nn.Embedding(3, 2)
    arrays = nn.Sequential(nn.Flatten(), mlp(4, 3))
    # A worker for each stage and partition.
    plain = df.coalesce(1).selectExpr("k", "CAST(k AS DOUBLE) / 9 AS z", "x", "'high' AS s")
    plain = plain.withColumn("a", F.array(*[F.col("z") * i for i in range(4)]))
    decoders = {"s": {"low": 0, "high": 2}}
    empty = TorchModel(feature_cols=["a"], label_cols=["a"], input_shapes=[[-1, 2, 2]])
    stages = [
        TorchModel.from_module(
            numbers,
            feature_cols=["z", "k"],
            label_cols="n",
            loss="cross_entropy",
            probabilityCol="p",
        ),
        TorchModel(model=vectors, feature_columns=["x"], label_columns=["v"]),
        empty.setModel(arrays).copy(),
        TorchModel.from_module(table, feature_cols="s", outputCols="t", decoders=decoders),
    ]
    pipeline = PipelineModel(stages)
    pipeline.write().overwrite().save(f"{tmp_path}/pipeline")
    loaded = PipelineModel.load(f"{tmp_path}/pipeline")
    found = pipeline.transform(plain).collect()
    assert {r.k: r for r in loaded.transform(plain).collect()} == {r.k: r for r in found}
    with torch.no_grad():
        z = torch.tensor([[r.z, r.k] for r in found]).float()
        x = torch.tensor(np.array([r.x.toArray() for r in found])).float()
        want = {
            "n__output": numbers(z),
            "p": numbers(z).softmax(1),
            "v__output": vectors(x)[:, 0],
            "a__output": arrays(torch.tensor([r.a for r in found]).float()),
            "t": table(torch.full((30,), 2)),
        }
    for name, values in want.items():
        rows = [v if isinstance(v := r[name], float) else v.toArray() for r in found]
        np.testing.assert_allclose(np.array(rows), values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_transform_handles_many_batches(spark: SparkSession) -> None:
    wide = F.array(*[F.rand(i) for i in range(8)])
    df = spark.range(0, 100_000, 1, 2).select(array_to_vector(wide).alias("x"))
    model = fitted(mlp(8), inputs=8)
    total, count = (
        model.transform(df).agg(F.sum("y__output"), F.count("y__output")).first()  # type: ignore[misc]
    )
    assert count == 100_000
    assert np.isfinite(total)
