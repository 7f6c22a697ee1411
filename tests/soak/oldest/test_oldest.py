"""Use of Spark ML with the oldest pyspark, numpy and pyarrow that are supported (`make test-oldest`)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyspark
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import OneVsRest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import functions as F  # noqa: N812 - everyone's name
from torch import nn

from sparkhvd import Store, TorchClassifier, TorchEstimator, TorchModel, trust
from tests.estimator.fits import assert_same_weights, estimator, fitted, mlp

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not pyspark.__version__.startswith("3.5."),
        reason="with newer pyspark tests/estimator shows the same; run make test-oldest",
    ),
]


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [(i / 20, 1 - i / 10, i / 20 - 1.0) for i in range(24)]
    return spark.createDataFrame(rows, "a double, b double, y double").coalesce(2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.create(tmp_path_factory.mktemp("oldest"))


@pytest.fixture(scope="module")
def pipeline(store: Store) -> Pipeline:
    fit = estimator(mlp(2), store, num_proc=1, epochs=2)
    return Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), fit])


@pytest.fixture(scope="module")
def model(df: DataFrame, pipeline: Pipeline) -> PipelineModel:
    return pipeline.fit(df)


def predictions(model: Any, df: DataFrame) -> list[float]:
    return [row.prediction for row in model.transform(df).orderBy("a").collect()]


def test_installed_versions_are_the_oldest_supported() -> None:
    assert np.__version__.startswith("1.26.")
    assert pyarrow.__version__.startswith("14.")


def test_fit_and_transform_work_on_two_ranks(df: DataFrame, store: Store) -> None:
    trained = estimator(mlp(2), store, feature_cols=["a", "b"], validation=0.25).fit(df)
    assert {"loss", "val_loss"} <= set(trained.history[-1])
    found = [row.y__output for row in trained.transform(df).orderBy("a").collect()]
    inputs = torch.tensor([[row.a, row.b] for row in df.orderBy("a").collect()])
    with torch.no_grad():
        expected = trained.getModel()(inputs).reshape(-1).tolist()
    assert found == pytest.approx(expected, abs=1e-6)


def test_pipeline_and_its_model_are_saved_and_loaded(
    df: DataFrame, pipeline: Pipeline, model: PipelineModel, tmp_path: Path
) -> None:
    model.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert predictions(loaded, df) == predictions(model, df)
    model.write().overwrite().save(str(tmp_path / "model"))
    model.stages[1].save(str(tmp_path / "alone"))
    alone = TorchModel.load(str(tmp_path / "alone"))
    assert_same_weights(alone.getModel(), model.stages[1].getModel(), 0.0)
    pipeline.save(str(tmp_path / "pipeline"))
    with trust():
        again = Pipeline.load(str(tmp_path / "pipeline")).getStages()[1]
    assert isinstance(again, TorchEstimator)
    assert again.getStore() == pipeline.getStages()[1].getStore()


def test_cross_validator_selects_a_model_and_is_saved(
    df: DataFrame, pipeline: Pipeline, tmp_path: Path
) -> None:
    fit = pipeline.getStages()[1]
    validator = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(fit.learning_rate, [0.05]).build(),
        evaluator=RegressionEvaluator(labelCol="y"),
        numFolds=2,
        seed=1,
    )
    chosen = validator.fit(df)
    assert len(chosen.avgMetrics) == 1
    chosen.save(str(tmp_path / "chosen"))
    with trust():
        loaded = CrossValidatorModel.load(str(tmp_path / "chosen"))
    assert predictions(loaded, df) == predictions(chosen, df)


def test_classifier_works_alone_and_in_one_vs_rest(df: DataFrame, store: Store) -> None:
    assembled = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(df)
    rows = assembled.selectExpr("features", "double(a > 0.5) AS label")
    options = {"optimizer": "adam", "learning_rate": 0.1, "epochs": 8, "num_proc": 1, "verbose": 0}
    binary = TorchClassifier(
        model=nn.Linear(2, 1), loss="binary_cross_entropy_with_logits", store=store, **options
    )
    trained = binary.fit(rows)
    assert trained.evaluate(rows).areaUnderROC > 0.9
    row = trained.transform(rows).first()
    assert trained.predict(row.features) == row.prediction
    found = OneVsRest(classifier=binary).fit(rows).transform(rows)
    assert found.columns[-1] == "prediction"
    assert found.count() == 24


def test_wide_rows_warning_names_the_setting_that_limits_batches(
    spark: SparkSession,
) -> None:
    width, key = 50_000, "spark.sql.execution.arrow.maxRecordsPerBatch"
    wide = spark.range(3).select(F.array_repeat(F.lit(0.5), width).alias("x"))
    model = fitted(nn.Linear(width, 1), inputs=width)
    with pytest.warns(
        UserWarning, match=rf"a row has about 390 KiB.*10,000 rows are 3\.7 GiB.*{key}', 83\)"
    ):
        out = model.transform(wide)
    assert out.count() == 3
    spark.conf.set(key, 83)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model.transform(wide)
    finally:
        spark.conf.unset(key)


def test_streaming_dataframe_is_transformed(
    spark: SparkSession, df: DataFrame, model: PipelineModel, tmp_path: Path
) -> None:
    df.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(df.schema).parquet(str(tmp_path / "in"))
    out = model.transform(stream).select("a", "prediction")
    sink = {"checkpointLocation": str(tmp_path / "checkpoint"), "path": str(tmp_path / "out")}
    query = out.writeStream.options(**sink).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(300)
    finally:
        query.stop()
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("a").collect()
    assert [row.prediction for row in found] == predictions(model, df)
