"""Horovod's `horovod.spark.lightning`: the estimator of LightningModules and its model.

Each module imports only those above it:

    plain      training of a plain module by Lightning's trainer
    estimator  both classes
"""

from sparkhvd.spark import needs_pyspark

with needs_pyspark("horovod.spark.lightning"):
    from sparkhvd.horovod.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
