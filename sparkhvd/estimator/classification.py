"""`TorchClassifier` and its model, which are Spark ML's `ProbabilisticClassifier` and `ProbabilisticClassificationModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.linalg import DenseVector, Vectors

from sparkhvd.data.columns import heads
from sparkhvd.data.columns.labels import is_of_row
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.evaluation import ClassificationSummary
from sparkhvd.estimator.predictor import TorchPredictionModel, TorchPredictor
from sparkhvd.estimator.transform.single import Row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["TorchClassificationModel", "TorchClassifier"]


class TorchClassificationModel(TorchPredictionModel, ProbabilisticClassificationModel):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Trained classifier. `transform` adds `rawPrediction`, `probability` and `prediction`; classes are 0, 1, ..."""

    _as_if_set = frozenset({"rawPredictionCol", "probabilityCol", "predictionCol"})

    @classmethod
    def _known_link(cls, link: str, *, has_function: bool) -> str:
        if link in (heads.SOFTMAX, heads.SIGMOID):
            return link
        if has_function:
            return heads.SOFTMAX
        raise InvalidArgumentError(
            "TorchClassifier: the loss does not tell how probabilities follow from outputs. Give 'cross_entropy' (the default), "
            "'nll' or 'binary_cross_entropy_with_logits', or set output_fn to a function from an output to (rows, classes) "
            "probabilities."
        )

    @classmethod
    def _width_problem(cls, link: str, width: int) -> str:
        if "probability" in heads.known_kinds(link, width):
            return ""
        if link not in (heads.SOFTMAX, heads.SIGMOID):
            return (
                "nothing tells how probabilities follow from outputs. Give the loss of the training, or link='softmax' or "
                "'sigmoid', to TorchClassificationModel.from_module."
            )
        if link == heads.SIGMOID:
            return (
                f"the model's output has {width} elements per row, which BCE-with-logits takes for {width} labels. Let it have "
                "one for two classes, or give loss='cross_entropy'; TorchEstimator trains several labels."
            )
        return (
            f"the model's output has {width} elements per row. Let it have one score per class; two classes may have one logit, "
            "with loss='binary_cross_entropy_with_logits'."
        )

    @property
    def numClasses(self) -> int:  # noqa: N802 - Spark's names, here and below
        """Number of classes."""
        fitted = self._require_fitted()
        self._check_outputs(fitted)
        return heads.num_classes(fitted.links[0], fitted.widths[0])

    def predictRaw(self, value: Row) -> DenseVector:  # noqa: N802
        """Compute one row's raw prediction on the driver; arguments and errors as of `predict`."""
        return Vectors.dense(self._compute("raw", value).tolist())

    def predictProbability(self, value: Row) -> DenseVector:  # noqa: N802
        """Compute one row's probabilities on the driver; arguments and errors as of `predict`."""
        return Vectors.dense(self._compute("probability", value).tolist())

    def evaluate(self, dataset: DataFrame) -> ClassificationSummary:
        """Compare the predictions for rows with their labels; nothing is computed before a measure is asked for."""
        predictions, raw = self.transform(dataset), self._named("rawPredictionCol")
        return ClassificationSummary(
            predictions=predictions,
            labelCol=self.getLabelColumns()[0],
            predictionCol=self._named("predictionCol"),
            rawPredictionCol=raw,
            # Of a module that no fit has trained only `transform` knows it.
            numClasses=predictions.schema[raw].metadata["ml_attr"]["num_attrs"],
        )


class TorchClassifier(TorchPredictor, ProbabilisticClassifier):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Classifier: a `TorchEstimator` with one label, whose columns, loss and model are Spark ML's.

        classifier = TorchClassifier(model=net, optimizer="adam", epochs=10)  # of "features" and "label"
        model = classifier.fit(df)  # TorchClassificationModel
        model.evaluate(test).accuracy

    The model gives one score per class, or, with `loss="binary_cross_entropy_with_logits"`, one logit for two classes. Labels
    are whole numbers from 0. A loss of your own needs `output_fn`, which makes probabilities of outputs.
    """

    _model_class = TorchClassificationModel
    _other_defaults: ClassVar[Mapping[str, object]] = {"loss": "cross_entropy", "outputCols": [""]}

    def _check_label(self, schema: DataSchema) -> None:
        (label,) = schema.labels
        if not is_of_row(label):
            raise InvalidArgumentError(
                f"TorchClassifier: label {label.name!r} has {label.row_shape or 'any'} classes per row, and it must have one. "
                "TorchEstimator trains models that classify several places of a row."
            )
