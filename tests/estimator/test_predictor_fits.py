"""`TorchClassifier` and `TorchRegressor` among Spark ML's stages. One fit of each serves many tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import OneVsRest, OneVsRestModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import IndexToString, StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from torch import nn

from sparkhvd import (
    InvalidArgumentError,
    Store,
    TorchClassificationModel,
    TorchClassifier,
    TorchRegressionModel,
    TorchRegressor,
)
from tests.harness.soak import left_to_soak, soak

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

COLUMNS = ["rawPrediction", "probability", "prediction"]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = Store.create(tmp_path_factory.mktemp("predictors"))
    shared = {"batch_size": 16, "epochs": 8, "learning_rate": 0.1, "random_seed": 1}
    return {**shared, "optimizer": "adam", "num_proc": 1, "verbose": 0, "store": store}


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    """Three kinds of points: one is above the others, one is on their right."""
    generator = np.random.default_rng(1)
    rows = [
        (float(a), float(b), "high" if b > 1 else "right" if a > 1 else "low", float(2 * a - b))
        for a, b in generator.uniform(0, 2, (90, 2))
    ]
    frame = spark.createDataFrame(rows, "a double, b double, kind string, label double").coalesce(1)
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame).cache()


def test_classifier_works_as_a_spark_ml_classifier(
    df: DataFrame, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stages = [
        StringIndexer(inputCol="kind", outputCol="index", stringOrderType="alphabetAsc"),
        TorchClassifier(model=nn.Linear(2, 3), labelCol="index", **options),
        IndexToString(inputCol="prediction", outputCol="named", labels=["high", "low", "right"]),
    ]
    fitted = Pipeline(stages=stages).fit(df)
    model = fitted.stages[1]
    assert type(model) is TorchClassificationModel
    assert (model.numClasses, model.numFeatures) == (3, 2)
    assert model.summary.totalIterations == 8
    found = fitted.transform(df)
    assert found.columns == [*df.columns, "index", *COLUMNS, "named"]
    attributes = {name: found.schema[name].metadata["ml_attr"] for name in COLUMNS}
    assert attributes == {
        "rawPrediction": {"num_attrs": 3},
        "probability": {"num_attrs": 3},
        "prediction": {"type": "nominal", "num_vals": 3},
    }
    # One row on the driver equals a row of transform.
    rows = found.limit(5).collect()
    for row in rows:
        assert model.predict(row.features) == row.prediction
        raw, probability = model.predictRaw(row.features), model.predictProbability(row.features)
        np.testing.assert_allclose(raw.toArray(), row.rawPrediction.toArray(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(probability.toArray(), row.probability.toArray(), rtol=1e-5)
    # The summary has the evaluators' values.
    summary = model.evaluate(fitted.stages[0].transform(df))
    evaluator = MulticlassClassificationEvaluator(labelCol="index")
    assert summary.weightedFMeasure() == pytest.approx(evaluator.evaluate(found))  # f1
    assert summary.accuracy == pytest.approx(evaluator.setMetricName("accuracy").evaluate(found))
    assert 0.6 < summary.accuracy == pytest.approx(summary.weightedRecall)
    evaluator = evaluator.setMetricName("weightedPrecision")
    assert summary.weightedPrecision == pytest.approx(evaluator.evaluate(found))
    evaluator = evaluator.setMetricName("weightedFMeasure").setBeta(2.0)
    assert summary.weightedFMeasure(2.0) == pytest.approx(evaluator.evaluate(found))
    with pytest.raises(InvalidArgumentError, match="areaUnderROC is a metric for two classes, but"):
        _ = summary.areaUnderROC
    # A class whose threshold is 0 is always predicted, and the others by p / t.
    assert {
        r.prediction for r in model.copy({model.thresholds: [1, 0, 1]}).transform(df).collect()
    } == {1.0}
    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    model.setThresholds([0.2, 0.3, 0.5]).save(str(tmp_path / "alone"))
    loaded = PipelineModel.load(str(tmp_path / "pipeline"))
    assert loaded.transform(df).collect() == found.collect()
    alone = TorchClassificationModel.load(str(tmp_path / "alone"))
    assert alone.getThresholds() == [0.2, 0.3, 0.5]
    assert alone.predict(rows[0].features) == model.predict(rows[0].features)
    assert alone.transform(df).columns == [*df.columns, *COLUMNS]


@pytest.mark.parametrize(
    "is_chosen", [False, *left_to_soak("a CrossValidator: estimator/test_fit", True)]
)
def test_regressor_works_as_a_spark_ml_regressor(
    df: DataFrame, options: dict[str, Any], tmp_path: Path, *, is_chosen: bool
) -> None:
    regressor = TorchRegressor(model=nn.Linear(2, 1), **options)
    chosen: Any
    if is_chosen:
        chosen = CrossValidator(
            estimator=regressor,
            estimatorParamMaps=ParamGridBuilder().addGrid(regressor.maxIter, [20]).build(),
            evaluator=RegressionEvaluator(),
            numFolds=2,
            seed=1,
        ).fit(df)
        model = chosen.bestModel
    else:
        chosen = model = regressor.fit(df, {regressor.maxIter: 20})
    assert type(model) is TorchRegressionModel
    assert model.getPredictionCol() == "prediction"
    found = chosen.transform(df)
    assert found.columns == [*df.columns, "prediction"]
    rows = found.collect()
    assert [model.predict(r.features) for r in rows[:5]] == pytest.approx(
        [r.prediction for r in rows[:5]], rel=1e-5, abs=1e-6
    )
    errors = np.array([r.prediction - r.label for r in rows])
    summary = model.evaluate(df)
    assert summary.meanSquaredError == pytest.approx(np.square(errors).mean())
    assert summary.rootMeanSquaredError == pytest.approx(math.sqrt(summary.meanSquaredError))
    assert summary.meanAbsoluteError == pytest.approx(np.abs(errors).mean())
    assert summary.r2 == pytest.approx(RegressionEvaluator(metricName="r2").evaluate(found))
    model.save(str(tmp_path / "model"))
    assert TorchRegressionModel.load(str(tmp_path / "model")).transform(df).collect() == rows


@soak("a classifier works as one of Spark ML, here")
def test_one_vs_rest_accepts_a_binary_classifier(
    df: DataFrame, options: dict[str, Any], tmp_path: Path
) -> None:
    two = StringIndexer(inputCol="kind", outputCol="index").fit(df).transform(df).where("index < 2")
    binary = TorchClassifier(
        model=nn.Linear(2, 1), loss="binary_cross_entropy_with_logits", **options
    )
    model = OneVsRest(classifier=binary, labelCol="index").fit(two)
    found = model.transform(two)
    assert found.columns == [*two.columns, "rawPrediction", "prediction"]
    accuracy = MulticlassClassificationEvaluator(labelCol="index", metricName="accuracy")
    assert accuracy.evaluate(found) > 0.8
    model.write().overwrite().save(str(tmp_path / "rest"))
    with pytest.warns(UserWarning, match="is loaded without its store"):
        first = OneVsRestModel.load(str(tmp_path / "rest")).models[1]
    assert type(first) is TorchClassificationModel
    # Its labels are those of "one or rest"; rows are ranked by one logit.
    given = first.copy().setLabelCol("index")
    evaluator = BinaryClassificationEvaluator(labelCol="index")
    area = given.evaluate(two).areaUnderROC
    assert area == pytest.approx(evaluator.evaluate(given.transform(two)))
    assert area > 0.8


def test_labels_other_than_classes_raise_a_clear_error(
    df: DataFrame, options: dict[str, Any]
) -> None:
    few = df.selectExpr("features", "3.0D AS label").limit(4)
    with pytest.raises(
        InvalidArgumentError, match="'label' is 3 in the data, and the model's output has 2 classes"
    ):
        TorchClassifier(model=nn.Linear(2, 2), **options).fit(few)
    halves = few.selectExpr("features", "0.5D AS label")
    with pytest.raises(
        InvalidArgumentError, match=r"'label' .* It holds classes, which are 0, 1, 2"
    ):
        TorchClassifier(model=nn.Linear(2, 2), **options).fit(halves)
    with pytest.raises(InvalidArgumentError, match="has 1 elements per row. Return one"):
        TorchClassifier(model=nn.Linear(2, 1), **options).fit(
            few.selectExpr("features", "0.0D AS label")
        )
