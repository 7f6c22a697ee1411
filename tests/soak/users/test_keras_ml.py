"""`KerasEstimator` as a stage of Spark ML: param maps, CrossValidator, Pipelines, saved estimators, the user's functions of rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="runs where keras is: make test-users")

from pyspark.ml import Pipeline, PipelineModel  # noqa: E402 - after importorskip
from pyspark.ml.evaluation import (  # noqa: E402
    BinaryClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import VectorAssembler  # noqa: E402
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder  # noqa: E402
from pyspark.sql import functions as F  # noqa: E402, N812

import sparkhvd  # noqa: E402
from sparkhvd.estimator import image  # noqa: E402
from sparkhvd.keras import KerasEstimator, KerasModel  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)
ROWS = 90


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 2))
    y = x @ [0.5, -1.0] + 0.25
    rows = [
        (float(a), float(b), float(t), float(t + rng.normal() > 0), n % 3 == 0)
        for n, ((a, b), t) in enumerate(zip(x, y, strict=True))
    ]
    return spark.createDataFrame(rows, ["a", "b", "y", "label", "held_out"]).cache()


def network(activation: str | None = None) -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [keras.layers.Input((2,)), keras.layers.Dense(1, activation=activation)]
    )


def estimator(**options: Any) -> KerasEstimator:
    given: dict[str, Any] = {
        "model": network(),
        "optimizer": keras.optimizers.SGD(0.05),
        "loss": "mse",
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 8,
        "num_proc": 1,
        "verbose": 0,
    }
    return KerasEstimator(**{**given, **options})


def test_cross_validator_selects_by_a_spark_evaluator(df: DataFrame, tmp_path: Path) -> None:
    keras_estimator = estimator(feature_cols=["x"], store=tmp_path)
    assembled = VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(df)
    grid = ParamGridBuilder().addGrid(keras_estimator.learning_rate, [0.2, 1e-6]).build()
    evaluator = RegressionEvaluator(labelCol="y", metricName="rmse")
    found = CrossValidator(
        estimator=keras_estimator,
        estimatorParamMaps=grid,
        evaluator=evaluator,
        numFolds=2,
        seed=1,
    ).fit(assembled)
    better, worse = found.avgMetrics
    assert better < 0.1 < worse
    assert evaluator.evaluate(found.transform(assembled)) < 0.1
    assert isinstance(found.bestModel, KerasModel)
    assert not list((tmp_path / "data").glob("once-*/*.parquet"))  # a fold's rows go with it


def test_pipelines_are_saved_and_loaded_before_and_after_a_fit(
    df: DataFrame, tmp_path: Path
) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="x")
    model = network()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    stage = estimator(model=model, optimizer=None, loss=None, feature_cols=["x"])
    Pipeline(stages=[assembler, stage]).write().save(str(tmp_path / "pipeline"))
    with sparkhvd.trust():
        pipeline = Pipeline.load(str(tmp_path / "pipeline"))
    assert pipeline.getStages()[1].uid == stage.uid
    fitted = pipeline.fit(df, {stage.epochs: 2})
    assert [set(record) for record in fitted.stages[1].history] == [{"epoch", "loss", "mae"}] * 2
    assert fitted.stages[1].uid == stage.uid
    fitted.write().save(str(tmp_path / "fitted"))
    with sparkhvd.trust():
        loaded = PipelineModel.load(str(tmp_path / "fitted"))
    wanted = fitted.transform(df).select("prediction", "y__output").collect()
    assert loaded.transform(df).select("prediction", "y__output").collect() == wanted
    assert wanted[0].prediction == wanted[0].y__output


def test_auc_of_two_ranks_equals_one_process_and_spark(df: DataFrame) -> None:
    options = {
        "model": network("sigmoid"),
        "loss": "binary_crossentropy",
        "metrics": [keras.metrics.AUC(num_thresholds=2000, name="auc"), keras.metrics.Precision()],
        "label_cols": ["label"],
        "validation": "held_out",
        "epochs": 2,
    }
    one, two = (
        estimator(**options, num_proc=ranks, batch_size=8 // ranks).fit(df) for ranks in (1, 2)
    )
    for record, other in zip(two.history, one.history, strict=True):
        assert record == pytest.approx(other, abs=1e-6)
    predicted = two.transform(df.where("held_out"))
    area = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(predicted)
    assert area == pytest.approx(two.history[-1]["val_auc"], abs=1e-3)
    row = predicted.first()
    assert row.probability[1] == row.label__output
    assert row.prediction == float(row.label__output > 0.5)


def stacked(row: dict[str, Any]) -> dict[str, Any]:
    assert [row[name].dtype for name in ("a", "b", "y")] == [
        np.float64
    ] * 3  # the columns are doubles
    return {"a": np.stack([row["a"] - 1, 2 * row["b"]]), "y": row["y"], "b": row["b"] * 0}


def test_transformation_function_equals_a_dataframe_with_its_columns(
    df: DataFrame, spark: SparkSession
) -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    options = {"model": model, "validation": "held_out", "epochs": 2}
    made = df.select(F.array(df.a - 1, 2 * df.b).alias("a"), F.lit(0.0).alias("b"), "y", "held_out")
    given, wanted = (
        estimator(transformation_fn=stacked, **options).fit(df),
        estimator(**options).fit(made),
    )
    for a, b in zip(given.getModel().get_weights(), wanted.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert given.history[-1] == pytest.approx(wanted.history[-1], abs=1e-5)
    found, expected = (fitted.transform(made).first().prediction for fitted in (given, wanted))
    assert found == pytest.approx(expected, abs=1e-5)


def test_decoders_convert_text_columns_for_fit_and_transform(
    df: DataFrame, spark: SparkSession
) -> None:
    text = df.select(F.format_string("%.6f %.6f", "a", "b").alias("text"), "y")

    def numbers(value: str) -> Any:
        return np.array([float(each) for each in value.split()], "float32")

    fitted = estimator(
        feature_cols=["text"], decoders={"text": numbers}, num_workers=2, epochs=2
    ).fit(text)
    found = fitted.transform(text)
    model = fitted.getModel()
    rows = found.limit(3).collect()
    x = np.stack([numbers(row.text) for row in rows])
    wanted = model.predict(x, verbose=0)[:, 0].tolist()
    assert [row.prediction for row in rows] == pytest.approx(wanted, abs=1e-5)


def test_one_and_two_ranks_skip_the_same_broken_images(spark: SparkSession, tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow")  # noqa: N806 - everyone's name
    rng = np.random.default_rng(3)
    broken = {0, 1, 5, 10}
    rows = []
    for number in range(18):
        pixels = rng.integers(0, 255, (4, 4, 3), np.uint8)
        path = tmp_path / f"{number}.png"
        Image.fromarray(pixels).save(path)
        if number in broken:
            path.write_bytes(path.read_bytes()[:50])
        rows.append((number, str(path), float(pixels.mean() / 255), number % 3 == 2))
    df = spark.createDataFrame(rows, ["number", "path", "y", "held_out"]).coalesce(1)
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.layers.Input((3, 4, 4)), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    options = {
        "model": model,
        "metrics": ["mae"],
        "feature_cols": ["path"],
        "decoders": {"path": image(4, 4, broken="skip")},
        "validation": "held_out",
        "epochs": 2,
        "shuffle": False,
    }
    one, two = (estimator(**options, num_proc=n, batch_size=2 // n).fit(df) for n in (1, 2))
    for a, b in zip(one.getModel().get_weights(), two.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    for record, other in zip(one.history, two.history, strict=True):
        assert record == pytest.approx(other, abs=1e-5)
        assert (record["broken_rows"], record["val_broken_rows"]) == (3, 1)
    found = {row.number for row in two.transform(df).collect() if row.prediction is None}
    assert found == broken
