"""Permutation importance: features that the model uses matter, and features that it ignores do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import PCA, MaxAbsScaler, StandardScaler, VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

from sparkhvd import InvalidArgumentError
from sparkhvd.data.tables import element_names
from sparkhvd.estimator import importance
from tests.estimator.fits import fitted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def evaluator(spark: SparkSession) -> RegressionEvaluator:
    return RegressionEvaluator(labelCol="y", predictionCol="y__output", metricName="mse")


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    columns = spark.range(100).select(
        *(F.rand(i).alias(n) for i, n in enumerate(("much", "none", "some")))
    )
    columns = columns.withColumn("y", 3 * F.col("much") + F.col("some"))
    assembled = VectorAssembler(inputCols=["much", "none", "some"], outputCol="x")
    return assembled.transform(columns)


def exact() -> nn.Module:
    module = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[3.0, 0.0, 1.0]]))
    return module


def test_features_are_ranked_by_their_effect_on_the_model(
    df: DataFrame, evaluator: RegressionEvaluator
) -> None:
    model: Any = fitted(exact(), inputs=3)
    much, some, none = model.permutation_importance(df, evaluator, repeats=2)
    assert [each.feature for each in (much, some, none)] == ["much", "some", "none"]
    # Permuting adds twice the variance of what a feature contributes: 9 / 12 and 1 / 12.
    assert much.importance == pytest.approx(2 * 9 / 12, rel=0.4)
    assert some.importance == pytest.approx(2 * 1 / 12, rel=0.4)
    assert abs(none.importance) < 1e-9
    assert much.std > 0


def test_elements_of_an_unnamed_vector_are_numbered(
    df: DataFrame, evaluator: RegressionEvaluator
) -> None:
    bare = df.withColumn("x", array_to_vector(F.array("much", "none", "some")))
    model: Any = fitted(exact(), inputs=3)
    found = model.permutation_importance(bare, evaluator, num_rows=20, repeats=1)
    assert [each.feature for each in found] == ["x[0]", "x[2]", "x[1]"]


def test_scalers_and_renames_keep_element_names_but_other_stages_do_not(df: DataFrame) -> None:
    scaler = StandardScaler(inputCol="x", outputCol="scaled", withMean=True).fit(df)
    largest = MaxAbsScaler(inputCol="renamed", outputCol="scaled").fit(
        df.selectExpr("x AS renamed")
    )
    scaled = scaler.transform(df)
    twice = largest.transform(scaled.drop("x").withColumnRenamed("scaled", "renamed"))
    names = {0: "much", 1: "none", 2: "some"}
    assert element_names(scaled, "scaled") == names
    assert element_names(twice.where("y > 0").drop("renamed").limit(9), "scaled") == names
    # Other numbers in as many columns.
    mixed = PCA(k=3, inputCol="x", outputCol="mixed").fit(df).transform(df)
    assert element_names(mixed, "mixed") == {}
    model: Any = fitted(exact(), inputs=3)
    as_input = scaled.drop("x").withColumnRenamed("scaled", "x")
    evaluator = RegressionEvaluator(labelCol="y", predictionCol="y__output")
    found = model.permutation_importance(as_input, evaluator, num_rows=20, repeats=1)
    assert {each.feature for each in found} == {"much", "none", "some"}


class OfHalf(RegressionEvaluator):
    """A user's evaluator that reads other columns than its Params name."""

    def _evaluate(self, dataset: DataFrame) -> float:
        half = dataset.where("`which half` = 0")
        return super()._evaluate(half.withColumn(self.getLabelCol(), F.col("y")))


def test_custom_evaluator_can_read_any_column(df: DataFrame) -> None:
    model: Any = fitted(exact(), inputs=3)
    evaluator = OfHalf(labelCol="made", predictionCol="y__output", metricName="mse")
    halves = df.withColumn("which half", (F.col("y") > 2).cast("int"))
    found = model.permutation_importance(halves, evaluator, num_rows=40, repeats=1)
    assert [each.feature for each in found] == ["much", "some", "none"]


def test_fast_and_collected_row_copies_have_equal_rows_and_types(df: DataFrame) -> None:
    number = F.pmod(F.monotonically_increasing_id(), F.lit(3)).cast("int")
    rows = df.select(
        number.alias(importance._VARIANT),
        F.col("x").alias("raw`x"),
        F.expr("y > 2 AS `la.bel`"),
        "y",
    )
    rows = rows.withColumn("y", F.when(F.col("y") > 1, F.col("y")))
    fast = [make() for make in importance._copies_of_rows(rows, 3)]
    slow = [make() for make in importance._collected_copies(rows, 3)]
    assert sum(copy.count() for copy in fast) == 100
    for one, other in zip(fast, slow, strict=True):
        assert one.collect() == other.collect()
        types = [(f.name, f.dataType, f.metadata) for f in one.schema.fields]
        assert types == [(f.name, f.dataType, f.metadata) for f in other.schema.fields]
    assert fast[0].schema["raw`x"].metadata["ml_attr"]["num_attrs"] == 3


def test_invalid_permutation_arguments_raise(df: DataFrame, evaluator: RegressionEvaluator) -> None:
    model: Any = fitted(exact(), inputs=3)
    with pytest.raises(InvalidArgumentError, match="has 1 rows"):
        model.permutation_importance(df.limit(1), evaluator)
    with pytest.raises(InvalidArgumentError, match="at least 2 and 1"):
        model.permutation_importance(df, evaluator, repeats=0)
    with pytest.raises(InvalidArgumentError, match="'x', which the DataFrame does not have"):
        model.permutation_importance(df.drop("x"), evaluator)
    with pytest.raises(InvalidArgumentError, match="labelCol is 'y', which the DataFrame does not"):
        model.permutation_importance(df.drop("y"), evaluator)
    with pytest.raises(InvalidArgumentError, match="evaluator is 'auc'; it must be an evaluator"):
        model.permutation_importance(df, "auc")
