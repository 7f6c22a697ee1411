"""Horovod's `horovod.spark.torch`: the estimator and its model.

Each module imports only those above it:

    estimator  both classes
"""

from sparkhvd.spark import needs_pyspark

with needs_pyspark("horovod.spark.torch"):
    from sparkhvd.horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
