"""Horovod's `horovod.spark.elastic`: `run_elastic` by its other name."""

from sparkhvd.horovod.spark import run_elastic

__all__ = ["run_elastic"]
