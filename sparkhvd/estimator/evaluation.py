"""Measures of a model's predictions, with the names of Spark ML's summaries.

One aggregation over the rows computes all measures, so that the model runs on each row once. The DataFrame is not
cached, because caching lets a Connect server copy the session's files, and tasks fail after such a copy is deleted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import functions as F  # noqa: N812 - everyone's name

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.training.metrics import RESERVED
from sparkhvd.training.types import History

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, eq=False)
class _Summary:
    """Base class of summaries. Measures are computed on first access.

    Attributes:
        predictions: DataFrame that `transform` returned.
        labelCol: column with the labels.
        predictionCol: column with the predictions.
    """

    predictions: DataFrame = field(repr=False)
    labelCol: str  # noqa: N815 - Spark's names
    predictionCol: str  # noqa: N815

    @property
    def _pairs(self) -> DataFrame:
        """Select labels and predictions as doubles."""
        columns = (("label", self.labelCol), ("prediction", self.predictionCol))
        chosen = [self.predictions[column].cast("double").alias(name) for name, column in columns]
        return self.predictions.select(*chosen)


@dataclass(frozen=True, eq=False)
class ClassificationSummary(_Summary):
    """Measures of a classifier.

    Attributes:
        rawPredictionCol: column whose values rank the rows of two classes.
        numClasses: number of classes.
    """

    rawPredictionCol: str  # noqa: N815
    numClasses: int  # noqa: N815

    @cached_property
    def _counts(self) -> Mapping[tuple[float, float], int]:
        """Number of rows by (label, prediction)."""
        rows = self._pairs.groupBy("label", "prediction").count().collect()
        return {(row.label, row.prediction): row["count"] for row in rows}

    def _classes(self) -> list[tuple[int, float, float]]:
        """List (rows, precision, recall) of each class in the labels."""
        labelled, predicted = Counter[float](), Counter[float]()
        for (label, prediction), count in self._counts.items():
            labelled[label] += count
            predicted[prediction] += count
        found = []
        for label, count in labelled.items():
            hits = self._counts.get((label, label), 0)
            found.append((count, hits / predicted[label] if hits else 0.0, hits / count))
        return found

    @property
    def accuracy(self) -> float:
        """Share of rows with a correct prediction."""
        hits = sum(count for (label, found), count in self._counts.items() if label == found)
        return hits / sum(self._counts.values()) if self._counts else math.nan

    @property
    def weightedPrecision(self) -> float:  # noqa: N802
        """Mean precision of the classes, weighted by their rows."""
        return _mean((rows, precision) for rows, precision, _ in self._classes())

    @property
    def weightedRecall(self) -> float:  # noqa: N802
        """Mean recall of the classes, weighted by their rows."""
        return _mean((rows, recall) for rows, _, recall in self._classes())

    def weightedFMeasure(self, beta: float = 1.0) -> float:  # noqa: N802
        """Compute the mean F-measure of the classes, weighted by their rows."""

        def measure(precision: float, recall: float) -> float:
            parts = beta**2 * precision + recall
            return (1 + beta**2) * precision * recall / parts if parts else 0.0

        return _mean((rows, measure(p, r)) for rows, p, r in self._classes())

    @cached_property
    def areaUnderROC(self) -> float:  # noqa: N802
        """Area under the ROC curve of two classes, from one pass over the rows."""
        return self._of_two_classes("areaUnderROC")

    @cached_property
    def areaUnderPR(self) -> float:  # noqa: N802
        """Area under the precision-recall curve of two classes, from one pass over the rows."""
        return self._of_two_classes("areaUnderPR")

    def _of_two_classes(self, name: str) -> float:
        if self.numClasses != 2:
            raise InvalidArgumentError(
                f"{name} is a metric for two classes, but the model has {self.numClasses} classes."
            )
        return BinaryClassificationEvaluator(
            labelCol=self.labelCol,
            rawPredictionCol=self.rawPredictionCol,
            metricName=name,  # type: ignore[arg-type]  # a literal
        ).evaluate(self.predictions)


def _mean(measured: Iterable[tuple[int, float]]) -> float:
    """Compute the mean weighted by rows, or NaN without rows."""
    pairs = list(measured)
    rows = sum(count for count, _ in pairs)
    return sum(count * value for count, value in pairs) / rows if rows else math.nan


@dataclass(frozen=True, eq=False)
class RegressionSummary(_Summary):
    """Measures of a regressor, or NaN without rows."""

    @cached_property
    def _values(self) -> Mapping[str, float]:
        error = F.col("label") - F.col("prediction")
        (row,) = self._pairs.agg(
            F.avg(error * error).alias("mse"),
            F.avg(F.abs(error)).alias("mae"),
            F.var_pop("label").alias("variance"),
        ).collect()
        return {name: math.nan if value is None else value for name, value in row.asDict().items()}

    @property
    def rootMeanSquaredError(self) -> float:  # noqa: N802
        """Root of the mean squared error."""
        return math.sqrt(self.meanSquaredError)

    @property
    def meanSquaredError(self) -> float:  # noqa: N802
        return self._values["mse"]

    @property
    def meanAbsoluteError(self) -> float:  # noqa: N802
        return self._values["mae"]

    @property
    def r2(self) -> float:
        """Coefficient of determination (R squared), or NaN if all labels are equal."""
        variance = self._values["variance"]
        return 1 - self.meanSquaredError / variance if variance else math.nan


# ----------------------------------------------------------------------------------------------------
# Summary of a training, and its history in Horovod's format.


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a training, shown as one line when printed or in a notebook.

    Attributes:
        history: one record per epoch.
        timings: seconds of the phases: materialize, launch, train.
        run_id: name of the run in the store.
    """

    history: History
    timings: Mapping[str, float]
    run_id: str

    @property
    def totalIterations(self) -> int:  # noqa: N802 - Spark's name
        """Number of epochs."""
        return len(self.history)

    @property
    def objectiveHistory(self) -> list[float]:  # noqa: N802 - Spark's name
        """Training loss of each epoch, except epochs of a custom loop without a loss."""
        losses = [record.get("loss") for record in self.history]
        return [float(loss) for loss in losses if isinstance(loss, (int, float))]

    def __str__(self) -> str:
        numbers = self.history[-1] if self.history else {}
        losses = {name: numbers[name] for name in ("loss", "val_loss") if name in numbers}
        shown = [f"{n} {v:.4g}" for n, v in losses.items() if isinstance(v, (int, float))]
        epochs = f"{len(self.history)} epoch" + ("" if len(self.history) == 1 else "s")
        if self.timings:
            shown.append(f"{sum(self.timings.values()):.1f} s")
        return ", ".join([epochs, *shown])

    def __repr__(self) -> str:
        return f"TrainingSummary({self})"


def horovod_history(history: History, num_labels: int) -> History:
    """Separate training and validation numbers of the records, as in Horovod.

    Args:
        history: flat records; records already in Horovod's format are kept.
        num_labels: number of labels, by which `all_metrics` groups the numbers.
    """
    return [r if "train" in r else _nested(r, max(1, num_labels)) for r in history]


def _nested(record: Mapping[str, Any], num_labels: int) -> dict[str, Any]:
    of_epoch = {n: v for n, v in record.items() if n in RESERVED and n != "loss"}
    measured = {n: v for n, v in record.items() if n not in of_epoch}
    parts = {
        "train": {n: v for n, v in measured.items() if not n.startswith("val_")},
        "validation": {n[4:]: v for n, v in measured.items() if n.startswith("val_")},
    }
    for part in parts.values():
        metrics = [value for name, value in part.items() if name != "loss"]
        starts = range(0, len(metrics), num_labels)
        part["all_metrics"] = [metrics[start : start + num_labels] for start in starts]
    if len(parts["validation"]) == 1:  # only `all_metrics`: the fit had no validation
        del parts["validation"]
    return {**of_epoch, **parts}
