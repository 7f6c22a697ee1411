"""Horovod's `horovod.spark.common.constants` of its data path, unused here."""

from typing import NoReturn

__all__ = [
    "ARRAY",
    "BYTES_PER_GIB",
    "CUSTOM_SPARSE",
    "NOCHANGE",
    "PETASTORM_HDFS_DRIVER",
    "TOTAL_BUFFER_MEMORY_CAP_GIB",
]

ARRAY = "array"
BYTES_PER_GIB = 1 << 30
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
PETASTORM_HDFS_DRIVER = "libhdfs"
# Horovod's limit for the shuffled rows of a host's ranks.
TOTAL_BUFFER_MEMORY_CAP_GIB = 4

_ABSENT = {
    "METRIC_PRINT_FREQUENCY": "progress is shown per epoch, not per step. Print metrics of steps in a callback's on_step_end()",
    "MIXED_SPARSE_DENSE_VECTOR": "sparse and dense vectors of a column are one type. Leave it out",
}


def __getattr__(name: str) -> NoReturn:
    if name in _ABSENT:  # `from ... import` would drop the message of an AttributeError
        raise ImportError(
            f"horovod.spark.common.constants.{name} is not in sparkhvd: {_ABSENT[name]}.",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
