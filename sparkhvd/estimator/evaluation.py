"""Measures of a model's predictions, by the names of Spark ML's summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)

from sparkhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.ml.evaluation import Evaluator
    from pyspark.sql import DataFrame

__all__ = ["ClassificationSummary", "RegressionSummary"]


@dataclass(frozen=True, eq=False)
class _Summary:
    """Measures by Spark ML's evaluators. They are computed when the first is asked for: the model sees the rows once.

    Attributes:
        predictions: what `transform` returned.
        labelCol: column with the labels.
        predictionCol: column with the predictions.
    """

    predictions: DataFrame = field(repr=False)
    labelCol: str  # noqa: N815 - Spark's names
    predictionCol: str  # noqa: N815

    def _evaluators(self) -> Mapping[str, Evaluator]:
        """Make an evaluator for each measure."""
        raise NotImplementedError

    def _columns(self) -> Sequence[str]:
        """List the columns that the evaluators read."""
        return (self.labelCol, self.predictionCol)

    @cached_property
    def _values(self) -> Mapping[str, float]:
        kept = self.predictions.select(*self._columns()).persist()
        try:
            return {name: each.evaluate(kept) for name, each in self._evaluators().items()}
        finally:
            kept.unpersist()


@dataclass(frozen=True, eq=False)
class ClassificationSummary(_Summary):
    """Measures of a classifier.

    Attributes:
        rawPredictionCol: column by which two classes are ranked.
        numClasses: number of classes.
    """

    rawPredictionCol: str  # noqa: N815
    numClasses: int  # noqa: N815

    def _evaluators(self) -> Mapping[str, Evaluator]:
        names = ("accuracy", "weightedPrecision", "weightedRecall", "weightedFMeasure")
        made: dict[str, Evaluator] = {name: self._evaluator(name) for name in names}
        if self.numClasses == 2:
            for name in ("areaUnderROC", "areaUnderPR"):
                made[name] = BinaryClassificationEvaluator(
                    labelCol=self.labelCol,
                    rawPredictionCol=self.rawPredictionCol,
                    metricName=name,
                )
        return made

    def _evaluator(self, name: str, beta: float = 1.0) -> MulticlassClassificationEvaluator:
        return MulticlassClassificationEvaluator(
            labelCol=self.labelCol,
            predictionCol=self.predictionCol,
            metricName=name,  # type: ignore[arg-type]  # a literal
            beta=beta,
        )

    def _columns(self) -> Sequence[str]:
        ranked = [self.rawPredictionCol] if self.numClasses == 2 else []
        return [*super()._columns(), *ranked]

    @property
    def accuracy(self) -> float:
        """Share of the rows whose class is predicted."""
        return self._values["accuracy"]

    @property
    def weightedPrecision(self) -> float:  # noqa: N802
        """Mean precision of the classes, by their shares of the rows."""
        return self._values["weightedPrecision"]

    @property
    def weightedRecall(self) -> float:  # noqa: N802
        """Mean recall of the classes, by their shares of the rows."""
        return self._values["weightedRecall"]

    def weightedFMeasure(self, beta: float = 1.0) -> float:  # noqa: N802
        """Compute the mean F-measure of the classes, by their shares of the rows; another `beta` than 1 reads the rows again."""
        if beta == 1.0:
            return self._values["weightedFMeasure"]
        return self._evaluator("weightedFMeasure", beta).evaluate(self.predictions)

    @property
    def areaUnderROC(self) -> float:  # noqa: N802
        """Area under the receiver operating characteristic, of two classes."""
        return self._of_two_classes("areaUnderROC")

    @property
    def areaUnderPR(self) -> float:  # noqa: N802
        """Area under the curve of precision over recall, of two classes."""
        return self._of_two_classes("areaUnderPR")

    def _of_two_classes(self, name: str) -> float:
        if self.numClasses != 2:
            raise InvalidArgumentError(
                f"{name} is a measure of two classes, and the model has {self.numClasses}."
            )
        return self._values[name]


@dataclass(frozen=True, eq=False)
class RegressionSummary(_Summary):
    """Measures of a regressor."""

    def _evaluators(self) -> Mapping[str, Evaluator]:
        return {
            name: RegressionEvaluator(
                labelCol=self.labelCol,
                predictionCol=self.predictionCol,
                metricName=name,
            )
            for name in ("rmse", "mse", "mae", "r2")
        }

    @property
    def rootMeanSquaredError(self) -> float:  # noqa: N802
        """Root of the mean squared error."""
        return self._values["rmse"]

    @property
    def meanSquaredError(self) -> float:  # noqa: N802
        """Mean squared error."""
        return self._values["mse"]

    @property
    def meanAbsoluteError(self) -> float:  # noqa: N802
        """Mean absolute error."""
        return self._values["mae"]

    @property
    def r2(self) -> float:
        """Share of the labels' variance that is explained."""
        return self._values["r2"]
