"""Horovod's `horovod.spark.keras`: the estimator of models of Keras 3 and its model.

Each module imports only those above it:

    estimator  both classes
"""

from sparkhvd.spark import needs_pyspark

with needs_pyspark("horovod.spark.keras"):
    from sparkhvd.horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
