"""Horovod's `horovod.spark.keras.estimator`, of Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sparkhvd.as_horovod import Stub
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.fitting.runs import new_run_id
from sparkhvd.estimator.params.base import accessors
from sparkhvd.estimator.params.converters import any_value
from sparkhvd.estimator.params.groups import CompatibilityParams
from sparkhvd.estimator.params.table import param
from sparkhvd.horovod.spark.common.backend import launch_arguments
from sparkhvd.horovod.spark.common.estimator import HorovodEstimator
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import DEFAULTS, OUTPUTS_ALONE, EstimatorParams
from sparkhvd.horovod.spark.common.store import Store
from sparkhvd.keras import estimator as own
from sparkhvd.keras.estimator import KerasParams
from sparkhvd.keras.model import KerasModel as OwnModel
from sparkhvd.keras.network import Network
from sparkhvd.keras.training import KerasTrainSpec, LoggerBridge, Trained, train

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkhvd.estimator.params.generated import FitOptions

__all__ = ["EstimatorParams", "KerasEstimator", "KerasModel"]

# Arguments of `SparkBackend` passed to `run`.
_LAUNCH = ("stderr", "stdout", "verbose", "start_timeout", "prefix_output_with_timestamp")


def to_network(value: object) -> Any:
    """Wrap a Keras model, because its own pickle lacks the classes of user-defined layers."""
    return value if value is None or isinstance(value, Network) else Network(value)


def _predict(function: Any, network: Network, row: Mapping[str, Any]) -> Any:
    return function(network.model, row)


class KerasModel(HorovodModel, OwnModel):  # type: ignore[misc]  # `history` is a Param here
    """Model of Keras, with Horovod's Params and hooks."""

    _own_class = OwnModel
    model = param(to_network, "trained model")
    custom_objects = KerasParams.custom_objects
    _floatx = param(any_value, "Keras' default dtype in the training")

    def getModel(self) -> Any:  # noqa: N802 - Horovod's name
        """The trained Keras model."""
        network = self._get("model")
        return OwnModel.getModel(self) if network is None else network.model

    def _row_function(self) -> tuple[Any, Any]:
        network = Network(self.getModel(), self._get("custom_objects"))
        return functools.partial(_predict, self.get_prediction_fn()), network


@accessors
class KerasEstimator(HorovodEstimator, own.KerasEstimator):
    """Estimator of a Keras model with Horovod's behaviour.

    Differences from `sparkhvd.keras.KerasEstimator`: learning rates are multiplied by the number of ranks, unless they follow a
    schedule, and a run with an existing `run_id` is continued.
    """

    _other_defaults: ClassVar[Mapping[str, object]] = {
        **OUTPUTS_ALONE,
        **{name: value for name, value in DEFAULTS.items() if name != "keep_checkpoints"},
        "drop_last": False,
    }

    checkpoint_callback = KerasParams.checkpoint_callback
    custom_objects = KerasParams.custom_objects
    inmemory_cache_all = CompatibilityParams.inmemory_cache_all
    label_shapes = param(any_value, "no effect", no_effect="the model's outputs have them")

    def get_model_class(self) -> type[Any]:
        return KerasModel

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any
    ) -> dict[str, Any]:
        return {
            "history": history,
            "model": model,
            "feature_columns": self._get("feature_cols"),
            "label_columns": self._get("label_cols"),
            "custom_objects": self._get("custom_objects"),
            "run_id": run_id,
            "_metadata": metadata,
            "_floatx": "float32",
        }

    def _options(self) -> FitOptions:
        options = super()._options()
        store = options.store
        if options.run_id is None and (not isinstance(store, Store) or store.saving_runs()):
            options = replace(options, run_id=new_run_id(self.uid))
        return options

    def _check_values(self) -> None:
        super()._check_values()
        module = self._get("data_module")
        if module is not None and not (isinstance(module, type) and issubclass(module, Stub)):
            raise InvalidArgumentError(
                f"KerasEstimator: data_module is {module!r:.100}, and ranks take their batches from the fit. Leave it out; transformation_fn, "
                "batch_transform_fn and decoders change rows."
            )

    def _run_ranks(  # type: ignore[override]  # of a fit of Keras, behind a mixin for fits of modules
        self,
        order: KerasTrainSpec,
        options: FitOptions,
        spark: SparkSession,
        following: LoggerBridge,
        **arguments: Any,
    ) -> Sequence[Trained | None]:
        env = self._variables()
        if (launching := launch_arguments(self._backend)) is not None:
            given, of_backend = launching
            given = {name: given[name] for name in _LAUNCH if name in given}
            given["env"] = {**of_backend, **env}
            return own.KerasEstimator._run_ranks(self, order, options, spark, following, **given)
        order = replace(order, logs_epochs=False)  # the backend has its own output
        return list(self._backend.run(train, args=(order,), kwargs={}, env=env))
