"""`TorchRegressor` and its model, which are Spark ML's `Regressor` and `RegressionModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.regression import RegressionModel, Regressor

from sparkhvd.data.columns import heads
from sparkhvd.estimator.evaluation import RegressionSummary
from sparkhvd.estimator.predictor import TorchPredictionModel, TorchPredictor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["TorchRegressionModel", "TorchRegressor"]


class TorchRegressionModel(TorchPredictionModel, RegressionModel[Any]):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Trained regressor. `transform` adds `prediction`: the model's output, or what `output_fn` makes of it."""

    _as_if_set = frozenset({"predictionCol"})

    @classmethod
    def _known_link(cls, link: str, *, has_function: bool) -> str:
        del link, has_function
        return heads.VALUE

    @classmethod
    def _width_problem(cls, link: str, width: int) -> str:
        if width == 1:
            return ""
        return f"the model's output has {width} elements per row, and it must have one. TorchEstimator trains models of vectors."

    def evaluate(self, dataset: DataFrame) -> RegressionSummary:
        """Compare the predictions for rows with their labels; nothing is computed before a measure is asked for."""
        return RegressionSummary(
            predictions=self.transform(dataset),
            labelCol=self.getLabelColumns()[0],
            predictionCol=self._named("predictionCol"),
        )


class TorchRegressor(TorchPredictor, Regressor[TorchRegressionModel]):  # type: ignore[misc]  # Spark's Params are rows of our table
    """Regressor: a `TorchEstimator` with one label, whose columns, loss and model are Spark ML's.

        regressor = TorchRegressor(model=net, optimizer="adam", epochs=10)  # of "features" and "label"
        model = regressor.fit(df)  # TorchRegressionModel
        model.evaluate(test).rootMeanSquaredError

    The model gives one number per row. With a loss on another scale than the label's (logarithms), `output_fn` brings outputs
    back to it.
    """

    _model_class = TorchRegressionModel
    _other_defaults: ClassVar[Mapping[str, object]] = {"loss": "mse", "outputCols": [""]}
