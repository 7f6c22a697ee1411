"""`TorchClassifier`, `TorchRegressor` and their models, with one label, one output and Spark ML's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.ml.param.shared import HasWeightCol
from pyspark.ml.regression import RegressionModel, Regressor

from sparkhvd.data.columns import labels
from sparkhvd.data.columns.labels import is_of_row
from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.estimator import TorchEstimator
from sparkhvd.estimator.evaluation import ClassificationSummary, RegressionSummary
from sparkhvd.estimator.fitting.inputs import FitData
from sparkhvd.estimator.fitting.recorder import Recorder
from sparkhvd.estimator.fitting.request import FitRequest
from sparkhvd.estimator.model import TorchModel
from sparkhvd.estimator.params.generated import FitOptions, PredictOptions
from sparkhvd.estimator.transform.local import Row, bind_row, num_features, predict_one
from sparkhvd.estimator.transform.worker import Output
from sparkhvd.observe.loggers.fanout import LoggerFanout
from sparkhvd.training.modules.fitted import TrainedState
from sparkhvd.training.spec import TrainSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TorchPredictionModel(TorchModel):
    """Base class of trained models with one output.

    Subclasses define the meaning of the output. The model also predicts rows on the driver.
    """

    _other_defaults: ClassVar[Mapping[str, object]] = {"outputCols": [""]}

    @classmethod
    def _known_link(cls, link: str, *, has_function: bool) -> str:
        """Map the link of the loss to the link of the model's output.

        Raises:
            InvalidArgumentError: the loss does not define the output's meaning.
        """
        raise NotImplementedError

    @classmethod
    def _width_problem(cls, link: str, width: int) -> str:
        """Explain why an output of this width does not fit the class, or return "" if it fits."""
        raise NotImplementedError

    def _check_outputs(self, fitted: TrainedState) -> None:
        super()._check_outputs(fitted)
        problem = (
            self._width_problem(fitted.links[0], fitted.widths[0])
            if len(fitted.widths) == 1
            else f"the model has {len(fitted.widths)} outputs, but must have one. TorchModel supports several outputs."
        )
        if problem:
            raise InvalidArgumentError(f"{type(self).__name__}: {problem}")

    def _name_no_outputs(self) -> None:
        """Keep the names of all columns, because the class defines the meaning of the output for any loss."""

    @property
    def numFeatures(self) -> int:  # noqa: N802 - Spark's name
        """How many numbers per row the model reads, or -1 if some inputs are not numbers."""
        return num_features(self._require_fitted())

    def predict(self, value: Row) -> float:
        """Predict one row on the driver, as `transform` does.

        Args:
            value: the row's numbers, concatenated over feature columns as by a VectorAssembler.

        Raises:
            InvalidArgumentError: the row has too few or too many numbers, or the model does not read only numbers.
        """
        return float(self._compute("prediction", value)[0])

    def _named(self, param: str) -> str:
        """Read the column name in a Param, or raise an error for ""."""
        name: str = self._get(param)
        if not name:
            raise InvalidArgumentError(
                f"evaluate needs a column that {param}='' omits. Give {param} a name."
            )
        return name

    def _compute(self, kind: str, value: Row) -> npt.NDArray[np.float64]:
        """Compute the output column of a kind for one row."""
        options = self._read_options(PredictOptions)
        fitted, options = bind_row(self._require_fitted(), options, value)
        self._check_outputs(fitted)
        return predict_one(fitted, options, Output(kind, kind, 0, is_vector=True), value)


class TorchPredictor(TorchEstimator, HasWeightCol):
    """Estimator with Spark ML's names and a default loss."""

    _model_class: type[TorchPredictionModel]

    def _options(self) -> FitOptions:
        options = super()._options()
        if len(options.label_cols or ()) > 1:
            raise InvalidArgumentError(
                f"{type(self).__name__}: labelCol has {len(options.label_cols or ())} columns, but must have one. "
                "TorchEstimator trains models with several outputs."
            )
        has_own = options.loss_constructors is not None and "loss" not in options.explicit
        return replace(options, loss=None) if has_own else options

    def _train(
        self, request: FitRequest, recorder: Recorder, fanout: LoggerFanout
    ) -> tuple[TorchModel, int]:
        self._link(request)
        return super()._train(request, recorder, fanout)

    def _link(self, request: FitRequest) -> str:
        """Choose the link of the model's output. Raises an error if the loss does not define it."""
        has_function = request.options.output_fn is not None
        return self._model_class._known_link(request.links[0], has_function=has_function)

    def _check_label(self, schema: DataSchema) -> None:
        """Check the label once its shape is known."""

    def _untrained(
        self, request: FitRequest, spec: TrainSpec, data: FitData, widths: tuple[int, ...] | None
    ) -> TorchModel:
        self._check_label(spec.transformed or data.schema)
        model = super()._untrained(request, spec, data, widths)
        fitted = replace(model._require_fitted(), links=(self._link(request),))
        if fitted.widths:
            model._check_outputs(fitted)
        model._fitted = fitted
        # `feature_cols` may come from `inputs`, so set it on the model, whose default would be another column.
        return model._set(feature_cols=request.options.feature_cols)  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------
# `TorchClassifier` and its model, which are Spark ML's `ProbabilisticClassifier` and
# `ProbabilisticClassificationModel`.


class TorchClassificationModel(TorchPredictionModel, ProbabilisticClassificationModel):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Trained classifier. `transform` adds `rawPrediction`, `probability` and `prediction`.

    Classes are 0, 1, ...
    """

    _as_if_set = frozenset({"rawPredictionCol", "probabilityCol", "predictionCol"})

    @classmethod
    def _known_link(cls, link: str, *, has_function: bool) -> str:
        if link in (labels.SOFTMAX, labels.SIGMOID):
            return link
        if has_function:
            return labels.SOFTMAX
        raise InvalidArgumentError(
            "TorchClassifier: the loss does not define how to compute probabilities from outputs. Give 'cross_entropy' (the default), "
            "'nll' or 'binary_cross_entropy_with_logits', or set output_fn to a function from an output to (rows, classes) "
            "probabilities."
        )

    @classmethod
    def _width_problem(cls, link: str, width: int) -> str:
        if "probability" in labels.known_kinds(link, width):
            return ""
        if link not in (labels.SOFTMAX, labels.SIGMOID):
            return (
                "it is not known how to compute probabilities from outputs. Give the loss of the training, or link='softmax' or "
                "'sigmoid', to TorchClassificationModel.from_module."
            )
        if link == labels.SIGMOID:
            return (
                f"the model's output has {width} elements per row, which BCE-with-logits treats as {width} labels. Return one element for "
                "two classes, or give loss='cross_entropy'; TorchEstimator trains models with several labels."
            )
        return (
            f"the model's output has {width} elements per row. Return one score per class; for two classes one logit is enough with "
            "loss='binary_cross_entropy_with_logits'."
        )

    @property
    def numClasses(self) -> int:  # noqa: N802 - Spark's names, here and below
        """Number of classes."""
        fitted = self._require_fitted()
        self._check_outputs(fitted)
        return labels.num_classes(fitted.links[0], fitted.widths[0])

    def predictRaw(self, value: Row) -> DenseVector:  # noqa: N802
        """Compute a row's raw prediction on the driver, with arguments and errors of `predict`."""
        return Vectors.dense(self._compute("raw", value).tolist())

    def predictProbability(self, value: Row) -> DenseVector:  # noqa: N802
        """Compute a row's probabilities on the driver, with arguments and errors of `predict`."""
        return Vectors.dense(self._compute("probability", value).tolist())

    def evaluate(self, dataset: DataFrame) -> ClassificationSummary:
        """Compare predictions with labels. Measures are computed on first access."""
        predictions, raw = self.transform(dataset), self._named("rawPredictionCol")
        return ClassificationSummary(
            predictions=predictions,
            labelCol=self.getLabelColumns()[0],
            predictionCol=self._named("predictionCol"),
            rawPredictionCol=raw,
            # `transform` writes the number of classes into the column's metadata, also for a module without a fit.
            numClasses=predictions.schema[raw].metadata["ml_attr"]["num_attrs"],
        )


class TorchClassifier(TorchPredictor, ProbabilisticClassifier):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Classifier: a `TorchEstimator` with one label and Spark ML's columns, loss and model.

        classifier = TorchClassifier(model=net, optimizer="adam", epochs=10)  # of "features" and "label"
        model = classifier.fit(df)  # TorchClassificationModel
        model.evaluate(test).accuracy

    The model returns one score per class, or, with `loss="binary_cross_entropy_with_logits"`, one logit for two
    classes. Labels are whole numbers from 0. A custom loss needs `output_fn`, which computes probabilities from
    outputs.
    """

    _model_class = TorchClassificationModel
    _other_defaults: ClassVar[Mapping[str, object]] = {"loss": "cross_entropy", "outputCols": [""]}

    def _check_label(self, schema: DataSchema) -> None:
        (label,) = schema.labels
        if not is_of_row(label):
            raise InvalidArgumentError(
                f"TorchClassifier: label {label.name!r} has class indices of shape {label.row_shape or 'any'} per row, but must have one. "
                "TorchEstimator trains models that predict several classes per row, such as one per pixel."
            )


# ----------------------------------------------------------------------------------------------------
# `TorchRegressor` and its model, which are Spark ML's `Regressor` and `RegressionModel`.


class TorchRegressionModel(TorchPredictionModel, RegressionModel[Any]):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Trained regressor. `transform` adds `prediction`: the model's output, or the result of `output_fn`."""

    _as_if_set = frozenset({"predictionCol"})

    @classmethod
    def _known_link(cls, link: str, *, has_function: bool) -> str:
        del link, has_function
        return labels.VALUE

    @classmethod
    def _width_problem(cls, link: str, width: int) -> str:
        if width == 1:
            return ""
        return f"the model's output has {width} elements per row, but must have one. TorchEstimator trains models that predict vectors."

    def evaluate(self, dataset: DataFrame) -> RegressionSummary:
        """Compare predictions with labels. Measures are computed on first access."""
        return RegressionSummary(
            predictions=self.transform(dataset),
            labelCol=self.getLabelColumns()[0],
            predictionCol=self._named("predictionCol"),
        )


class TorchRegressor(TorchPredictor, Regressor[TorchRegressionModel]):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Regressor: a `TorchEstimator` with one label and Spark ML's columns, loss and model.

        regressor = TorchRegressor(model=net, optimizer="adam", epochs=10)  # of "features" and "label"
        model = regressor.fit(df)  # TorchRegressionModel
        model.evaluate(test).rootMeanSquaredError

    The model returns one number per row. If the loss uses another scale than the label, such as logarithms, `output_fn`
    converts outputs to the label's scale.
    """

    _model_class = TorchRegressionModel
    _other_defaults: ClassVar[Mapping[str, object]] = {"loss": "mse", "outputCols": [""]}
