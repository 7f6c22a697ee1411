"""All Params of a fit."""

from __future__ import annotations

from sparkhvd.estimator.params.cluster import ClusterParams
from sparkhvd.estimator.params.compatibility import CompatibilityParams
from sparkhvd.estimator.params.data import DataParams
from sparkhvd.estimator.params.model import ModelParams
from sparkhvd.estimator.params.prediction import PredictParams
from sparkhvd.estimator.params.training import TrainingParams

__all__ = ["TrainParams"]


class TrainParams(
    CompatibilityParams, ClusterParams, TrainingParams, DataParams, ModelParams, PredictParams
):
    """All Params of a fit."""
