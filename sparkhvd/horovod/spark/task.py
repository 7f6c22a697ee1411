"""Horovod's `horovod.spark.task`: the GPU of a rank."""

from pyspark import TaskContext

from sparkhvd import topology

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the number of the GPU of this rank, as CUDA counts in this process, in a list; in another task of Spark's those of the task's GPUs.

    Empty if there is none. A rank's is the number that `sparkhvd.torch.init()` makes the current one: where a process sees the GPUs of all ranks
    of its host, that is its local rank, whatever address Spark has for the GPU.
    """
    if (rank := topology.context()) is not None:
        return [] if rank.gpu is None else [str(rank.gpu)]
    task = TaskContext.get()
    gpu = None if task is None else task.resources().get("gpu")
    return [] if gpu is None else list(gpu.addresses)
