"""Horovod's `horovod.spark.torch`: the estimator and its model, which are sparkhvd's."""

from sparkhvd.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
