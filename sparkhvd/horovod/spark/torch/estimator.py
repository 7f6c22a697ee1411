"""Horovod's `horovod.spark.torch.estimator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sparkhvd import estimator as own
from sparkhvd.horovod.spark.common.estimator import HorovodEstimator
from sparkhvd.horovod.spark.common.model import HorovodModel
from sparkhvd.horovod.spark.common.params import OUTPUTS_ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TorchEstimator", "TorchModel"]


class TorchModel(HorovodModel, own.TorchModel):  # type: ignore[misc]  # `history` is a Param here
    """Model of a PyTorch module, with Horovod's Params and hooks."""


class TorchEstimator(HorovodEstimator, own.TorchEstimator):
    """Estimator of a PyTorch module that does what Horovod's does.

    As there, and other than `sparkhvd.TorchEstimator`: learning rates are multiplied by the number of ranks, rows that fill no step of all ranks
    are left out, labels are float32 unless the loss takes class indices, a run stays in the store, and one whose `run_id` is there is trained further.
    """

    _other_defaults: ClassVar[Mapping[str, object]] = {
        **OUTPUTS_ALONE,
        "lr_scaling": "linear",
        "drop_last": True,
        "keep_checkpoints": 1,
        "num_workers": 2,
    }

    def get_model_class(self) -> type[Any]:
        """Return the class of the model that a fit returns."""
        return TorchModel
