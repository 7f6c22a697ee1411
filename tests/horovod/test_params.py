"""Params and accessors of mixins after an estimator or a model of Horovod in the bases."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasLabelCol, HasPredictionCol

from sparkhvd.horovod.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.pure


class Columns(HasLabelCol, HasPredictionCol):
    """Has its own Params beside pyspark's, and replaces their accessors."""

    label_col: Any = Param(Params._dummy(), "label_col", "column of classes")
    prediction_col: Any = Param(Params._dummy(), "prediction_col", "column of predictions")

    def getLabelCol(self) -> Any:  # noqa: N802
        return self.getOrDefault(self.label_col)

    def getPredictionCol(self) -> Any:  # noqa: N802
        return self.getOrDefault(self.prediction_col)

    def setPredictionCol(self, value: str) -> Any:  # noqa: N802
        return self._set(prediction_col=value)


class Classifier(TorchEstimator, Columns):  # type: ignore[misc]  # untyped
    pass


class Finer(Classifier):
    def getLabelCol(self) -> Any:  # noqa: N802
        return f"finer {super().getLabelCol()}"


class ClassifierModel(TorchModel, Columns):  # type: ignore[misc]  # untyped
    pass


@pytest.mark.parametrize("kind", [Classifier, ClassifierModel])
def test_accessors_of_the_most_derived_class_are_used(kind: Any) -> None:
    made = kind()
    assert made._set(label_col="kind", labelCol="pyspark's").getLabelCol() == "kind"
    assert made.setPredictionCol("best").getPredictionCol() == "best"
    assert made.getOrDefault("prediction_col") == "best"


def test_further_derived_class_overrides_accessors() -> None:
    assert Finer()._set(label_col="kind").getLabelCol() == "finer kind"
