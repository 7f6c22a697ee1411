"""Horovod's `horovod.spark.keras`: the estimator and its model, which are sparkhvd's."""

from sparkhvd.keras.estimator import KerasEstimator
from sparkhvd.keras.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
