"""Bases of `TorchClassifier`, `TorchRegressor` and their models: one label, one output whose meaning the class tells, Spark ML's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pyspark.ml.param.shared import HasWeightCol

from sparkhvd.data.columns.schema import DataSchema
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.estimator import TorchEstimator
from sparkhvd.estimator.fitting.inputs import FitData
from sparkhvd.estimator.fitting.recorder import Recorder
from sparkhvd.estimator.fitting.request import Request
from sparkhvd.estimator.model import TorchModel
from sparkhvd.estimator.params.options import FitOptions, PredictOptions
from sparkhvd.estimator.transform.single import Row, bind_row, num_features, predict_one
from sparkhvd.estimator.transform.worker import Output
from sparkhvd.observe.loggers.followers import Followers
from sparkhvd.training.modules.fitted import Fitted
from sparkhvd.training.spec import TrainSpec

__all__ = ["TorchPredictionModel", "TorchPredictor"]


class TorchPredictionModel(TorchModel):
    """Trained model with one output, whose meaning the class tells; it predicts single rows on the driver, too."""

    _other_defaults: ClassVar[Mapping[str, object]] = {"outputCols": [""]}

    @classmethod
    def _known_link(cls, link: str, *, has_function: bool) -> str:
        """Return the link of the model's output, from that of the loss.

        Raises:
            InvalidArgumentError: the loss does not tell it.
        """
        raise NotImplementedError

    @classmethod
    def _width_problem(cls, link: str, width: int) -> str:
        """Say why an output with so many elements per row is none of this class, or ""."""
        raise NotImplementedError

    def _check_outputs(self, fitted: Fitted) -> None:
        super()._check_outputs(fitted)
        problem = (
            self._width_problem(fitted.links[0], fitted.widths[0])
            if len(fitted.widths) == 1
            else f"the model has {len(fitted.widths)} outputs, and it must have one. TorchModel has several."
        )
        if problem:
            raise InvalidArgumentError(f"{type(self).__name__}: {problem}")

    def _name_no_outputs(self) -> None:
        """Keep the names: the class tells the meaning of the output, with any loss and step."""

    @property
    def numFeatures(self) -> int:  # noqa: N802 - Spark's name
        """Numbers of a row that the model reads; -1 if not all are numbers."""
        return num_features(self._require_fitted())

    def predict(self, value: Row) -> float:
        """Predict one row on the driver, as `transform` does.

        Args:
            value: the row's numbers; those of several feature columns one after the other, as a VectorAssembler puts them.

        Raises:
            InvalidArgumentError: they are not those that the model reads, or it reads other things than numbers.
        """
        return float(self._compute("prediction", value)[0])

    def _named(self, param: str) -> str:
        """Return the column that a Param names."""
        name: str = self._get(param)
        if not name:
            raise InvalidArgumentError(
                f"evaluate needs a column that {param}='' leaves out. Give it a name."
            )
        return name

    def _compute(self, kind: str, value: Row) -> npt.NDArray[np.float64]:
        """Compute the value of an output column of a kind for one row."""
        options = self._read_options(PredictOptions)
        fitted, options = bind_row(self._require_fitted(), options, value)
        self._check_outputs(fitted)
        return predict_one(fitted, options, Output(kind, kind, 0, is_vector=True), value)


class TorchPredictor(TorchEstimator, HasWeightCol):
    """Estimator with Spark ML's names, whose loss has a default."""

    _model_class: type[TorchPredictionModel]

    def _options(self) -> FitOptions:
        options = super()._options()
        if len(options.label_cols or ()) > 1:
            raise InvalidArgumentError(
                f"{type(self).__name__}: labelCol has {len(options.label_cols or ())} columns, and it must have one. "
                "TorchEstimator trains models with several outputs."
            )
        has_own = options.loss_constructors is not None and "loss" not in options.explicit
        return replace(options, loss=None) if has_own else options

    def _train(
        self, request: Request, recorder: Recorder, followers: Followers
    ) -> tuple[TorchModel, int]:
        self._link(request)
        return super()._train(request, recorder, followers)

    def _link(self, request: Request) -> str:
        """Return the link of the model's output; raises where the loss does not tell it."""
        has_function = request.options.output_fn is not None
        return self._model_class._known_link(request.links[0], has_function=has_function)

    def _check_label(self, schema: DataSchema) -> None:
        """Check the label, now that its shape is known."""

    def _untrained(
        self, request: Request, spec: TrainSpec, data: FitData, widths: tuple[int, ...] | None
    ) -> TorchModel:
        self._check_label(spec.transformed or data.schema)
        model = super()._untrained(request, spec, data, widths)
        fitted = replace(model._require_fitted(), links=(self._link(request),))
        if fitted.widths:
            model._check_outputs(fitted)
        model._fitted = fitted
        # The default names none that follow from `inputs`.
        return model._set(feature_cols=request.options.feature_cols)  # type: ignore[no-any-return]
