"""Horovod's `horovod.spark.elastic`: a name that says that the number of ranks does not change on Spark."""

from sparkhvd.horovod.spark import run_elastic

__all__ = ["run_elastic"]
