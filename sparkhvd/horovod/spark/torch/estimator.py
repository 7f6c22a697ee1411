"""Horovod's `horovod.spark.torch.estimator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from sparkhvd import estimator as own
from sparkhvd.estimator import Callback
from sparkhvd.horovod.spark.common.estimator import HorovodEstimator
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import DEFAULTS, OUTPUTS_ALONE, EstimatorParams

__all__ = ["EstimatorParams", "TorchEstimator", "TorchModel"]


class TorchModel(HorovodModel, own.TorchModel):  # type: ignore[misc]  # `history` is a Param here
    """Model of a PyTorch module, with Horovod's Params and hooks."""


class TorchEstimator(HorovodEstimator, own.TorchEstimator):
    """Estimator of a PyTorch module with Horovod's behaviour.

    Differences from `sparkhvd.TorchEstimator`: learning rates are multiplied by the number of ranks, rows that fill no step of
    all ranks are dropped, labels are float32 unless the loss takes class indices, a run is kept in the store, and a run with an
    existing `run_id` is trained further.
    """

    _other_defaults: ClassVar[Mapping[str, object]] = {**OUTPUTS_ALONE, **DEFAULTS}

    def _read_options(self, options: type[Any]) -> Any:
        read = super()._read_options(options)
        # Horovod accepts callbacks of any kind, and calls none of them.
        return replace(read, callbacks=[c for c in read.callbacks or [] if isinstance(c, Callback)])

    def get_model_class(self) -> type[Any]:
        return TorchModel
