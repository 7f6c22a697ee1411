"""Horovod's `horovod.spark.common.util`: `is_databricks`, and `host_hash`, which raises an error."""

from sparkhvd import as_horovod
from sparkhvd.runner.preflight import databricks_runtime

__all__ = ["host_hash", "is_databricks"]

host_hash = as_horovod.stub(
    "horovod.spark.common.util.host_hash",
    "it is of Horovod's launcher. hvd.local_rank(), hvd.local_size() and hvd.cross_rank() tell which ranks share a host",
)


def is_databricks() -> bool:
    return bool(databricks_runtime())
