"""Horovod's `horovod.spark.task`: the GPU of a rank."""

from sparkhvd import topology
from sparkhvd.spark import needs_pyspark

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """This rank's GPU, in this process's CUDA numbering, as a list of one text. In another Spark task, the task's GPUs.

    Empty without a GPU. A rank's number is the current device of `sparkhvd.torch.init()`: if a process sees the GPUs of all ranks
    of its host, it is the local rank, for any address of the GPU in Spark.
    """
    if (rank := topology.context()) is not None:
        return [] if rank.gpu is None else [str(rank.gpu)]
    with needs_pyspark("horovod.spark.task, outside of a rank,"):
        from pyspark import TaskContext

    task = TaskContext.get()
    gpu = None if task is None else task.resources().get("gpu")
    return [] if gpu is None else list(gpu.addresses)
