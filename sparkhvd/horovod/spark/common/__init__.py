"""Horovod's `horovod.spark.common`.

backend  where the ranks of a fit run
store    where a fit keeps its files
"""
