"""Horovod's `horovod.spark.torch`: the estimator and its model.

Each module imports only those above it:

    estimator  both classes
"""

from sparkhvd.horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
