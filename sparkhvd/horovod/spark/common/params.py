"""Horovod's `horovod.spark.common.params`: Params with no effect in sparkhvd, and different defaults."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from pyspark.ml.param import Param

from sparkhvd.estimator.params.base import TorchParams, accessors
from sparkhvd.estimator.params.converters import any_value
from sparkhvd.estimator.params.table import param, rows_of

__all__ = ["DEFAULTS", "OUTPUTS_ALONE", "EstimatorParams", "ModelParams"]

_unused = functools.partial(param, any_value, "no effect", no_effect="nothing needs it")


# Turns off the columns that interpret outputs: Horovod's models add the outputs alone.
OUTPUTS_ALONE = {"predictionCol": "", "probabilityCol": "", "rawPredictionCol": ""}
# Default values of Horovod's estimators.
DEFAULTS = {
    "callbacks": [],
    "debug_data_loader": False,
    "drop_last": True,
    "keep_checkpoints": 1,
    "lr_scaling": "linear",
    "num_workers": 2,
    "partitions_per_process": 10,
    "reader_pool_type": "thread",
    "use_gpu": True,
    "val_reader_num_workers": 2,
}


class _Freely(TorchParams):
    """Base for subclasses with their own Params, mixins and attributes."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Prefer mixed-in classes' Params and accessors to sparkhvd's additions to Horovod."""
        super().__init_subclass__(**options)
        known = {base for base in cls.__mro__ if base.__module__.startswith("sparkhvd")}
        of_known = {each for base in known for each in base.__mro__}
        for base in cls.__mro__:
            if base in of_known:
                continue
            for name, value in vars(base).items():
                if isinstance(value, Param) or name.startswith(("get", "set")):
                    owner = next(each for each in cls.__mro__ if name in vars(each))
                    if owner in known:
                        setattr(cls, name, value)

    def __init__(self, *positional: object, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)  # of the next base class
        for name in rows_of(type(self)):
            # As in Horovod: a missing value is None, also for `getOrDefault`.
            self._defaultParamMap.setdefault(getattr(self, name), None)

    def _read_options(self, options: type[Any]) -> Any:
        read = super()._read_options(options)
        given = {name: getattr(read, name) for name in OUTPUTS_ALONE if name in read.explicit}
        # Horovod's True means a GPU if available.
        return replace(
            read, **{**OUTPUTS_ALONE, **given}, use_gpu=None if read.use_gpu else read.use_gpu
        )

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set(self, **values: object) -> Any:
        """Set Params, without a warning about Params without effect."""
        return TorchParams._set(self, **values)


@accessors
class EstimatorParams(_Freely):
    """Names of Horovod's estimators without effect here."""

    num_gpus = _unused(accessors=("NumGPUs",))
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
