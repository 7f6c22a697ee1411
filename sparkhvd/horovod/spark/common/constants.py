"""Horovod's `horovod.spark.common.constants`: words of its data path for how a column is stored."""

__all__ = ["ARRAY", "CUSTOM_SPARSE", "NOCHANGE", "PETASTORM_HDFS_DRIVER"]

ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
PETASTORM_HDFS_DRIVER = "libhdfs"
