"""Horovod's `horovod.spark.common.params`: names of Params that sparkhvd's estimators have not, and values that differ."""

from __future__ import annotations

import functools
from typing import Any

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import any_value
from sparkhvd.estimator.params.table import param

__all__ = ["OUTPUTS_ALONE", "EstimatorParams", "ModelParams"]

_unused = functools.partial(param, any_value, "no effect", no_effect="nothing needs it")


# There are outputs alone: no columns of their meaning.
OUTPUTS_ALONE = {"predictionCol": "", "probabilityCol": "", "rawPredictionCol": ""}


class _Freely(TorchParams):
    """Params of classes whose subclasses declare others and assign attributes of any name."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set(self, **values: object) -> Any:
        """Set Params, without a warning of those that have no effect."""
        return TorchParams._set(self, **values)


@accessors
class EstimatorParams(_Freely):
    """Names of Horovod's estimators that have no effect here."""

    num_gpus = _unused()
    loader_num_epochs = _unused()
    debug_data_loader = _unused()
    train_async_data_loader_queue_size = _unused()
    val_async_data_loader_queue_size = _unused()
    checkpoint_callback = _unused()
    custom_objects = _unused()


@accessors
class ModelParams(_Freely):
    """Params of Horovod's models besides columns."""

    history = param(any_value, "records of the epochs")
    model = param(any_value, "trained module")
    run_id = param(any_value, "name of the run in the store")
    _metadata = param(any_value, "types of the columns by name")
    optimizer = param(any_value, "optimizer of the training")
    loss = param(any_value, "losses of the training")
    loss_constructors = param(any_value, "functions that returned them")
