"""Device of a Python worker in `TorchModel.transform`: the GPU of its Spark task, or the CPU.

The worker is Spark's, and serves other tasks later, so CUDA_VISIBLE_DEVICES stays as it is: the address of a GPU is its
number in the process. Every process that uses a GPU takes a few hundred MB of it, so on a host only so many tasks compute
on one at a time; the others wait for a lock file, which the kernel frees when its holders end, whatever the reason.

Where one stage has several models, each has a worker of its own in the same task, and one feeds the other. They hold one
lock together: if each waited for its own, tasks whose first models have all of them would wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkhvd.errors import InvalidArgumentError

__all__ = ["NO_GPUS", "TASKS_PER_GPU", "TaskGpus", "choose", "held", "task_gpus"]

# Tasks of a host that compute on one GPU at a time; more would only share its time and take its memory.
TASKS_PER_GPU = 4
# The longest wait for them. They are alive, or their locks were free; so this is for tasks that never end, and longer than
# a partition may take to compute: who waits for one that is large must not fail.
WAIT_S = 24 * 3600.0
_POLL_S = 0.05


@dataclass(frozen=True)
class TaskGpus:
    """GPUs that Spark gave a task.

    Attributes:
        addresses: addresses of the GPUs.
        partition: number of the task's partition.
        name: the same in all workers of the task, and in no other task of this host; "" outside a task.
    """

    addresses: tuple[str, ...] = ()
    partition: int = 0
    name: str = ""


NO_GPUS = TaskGpus()


def task_gpus() -> TaskGpus:
    """Return the GPUs that Spark gave the task which runs in this worker."""
    from pyspark import TaskContext

    task = TaskContext.get()
    if task is None:
        return TaskGpus()
    gpu = task.resources().get("gpu")
    # Applications count tasks from 0 each; the parent of a worker is its executor's, and the same for all its workers.
    name = f"{os.getppid()}-{task.taskAttemptId()}"
    return TaskGpus(tuple(gpu.addresses) if gpu else (), task.partitionId(), name)


def choose(use_gpu: bool | None, task: TaskGpus) -> torch.device:
    """Choose the device of this task.

    Args:
        use_gpu: the Param; None is a GPU where Spark gave the task one, and torch is built for any.
        task: its GPUs.

    Raises:
        InvalidArgumentError: it is to be a GPU, and this process sees none, or not the one that Spark gave the task.
    """
    if use_gpu is False or (use_gpu is None and not task.addresses):
        return torch.device("cpu")
    if use_gpu is None and torch.version.cuda is None:
        warnings.warn(
            f"transform computes on the CPU, although Spark gave the task a GPU: torch {torch.__version__} of the worker is "
            "built without CUDA.",
            stacklevel=2,
        )
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    host = socket.gethostname()
    if not count:
        why = (
            f"Spark gave the task the GPU with address {task.addresses[0]}"
            if task.addresses
            else "use_gpu is True"
        )
        raise InvalidArgumentError(
            f"transform: {why}, and torch {torch.__version__} of the worker on host {host} sees none. Install torch with "
            "CUDA there, or set use_gpu=False on the model."
        )
    if not task.addresses:
        return torch.device("cuda", task.partition % count)
    index = _ordinal(task.addresses[0], count)
    if index is None:
        raise InvalidArgumentError(
            f"transform: Spark gave the task the GPU with address {task.addresses[0]}, and the worker on host {host} sees "
            f"{count}, numbered from 0. Let the discovery script print such numbers, or UUIDs; or set use_gpu=False on "
            "the model."
        )
    return torch.device("cuda", index)


def _ordinal(address: str, count: int) -> int | None:
    """Find the number that torch gives the GPU with an address: the address itself, or that of the GPU with this UUID."""
    if address.isdigit():
        return int(address) if int(address) < count else None
    for index in range(count):
        uuid = _uuid(index)
        if uuid and uuid in address:
            return index
    return None


def _uuid(index: int) -> str:
    """Return the UUID of a GPU, as torch counts; "" where this torch does not say."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


@contextlib.contextmanager
def held(
    device: torch.device,
    task: str = "",
    *,
    limit: int = TASKS_PER_GPU,
    wait_s: float = WAIT_S,
    folder: Path | None = None,
) -> Iterator[None]:
    """Hold one of the `limit` places of tasks of this host that compute on a device inside the block; the CPU has no limit.

    Args:
        device: device of this process.
        task: its name, see `TaskGpus`; "" is a task of its own.
        limit: number of tasks.
        wait_s: the longest wait.
        folder: folder of the lock files.

    Raises:
        TimeoutError: the others did not end in `wait_s` seconds.
    """
    if device.type == "cpu":
        yield
        return
    folder = folder or Path(tempfile.gettempdir(), f"sparkhvd-gpus-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + wait_s
    # By its own name: in containers with a GPU each and one folder for temporary files, each GPU is number 0.
    gpu = _uuid(device.index) or str(device.index)
    paths = [folder / f"{gpu}-{number}.lock" for number in range(limit)]
    while (lock := _lock(paths, task)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"transform: {limit} other tasks of this host have computed on {device} for {wait_s:g} s. Give "
                "tasks a larger share by spark.task.resource.gpu.amount, or set use_gpu=False on the model."
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


def _lock(paths: Sequence[Path], task: str) -> int | None:
    """Lock one of these files for a task: the one that another worker of it holds, else a free one, else none."""
    for take in (_join, _begin) if task else (_begin,):
        for path in paths:
            # The folder for temporary files is everybody's: no link of another user's is followed.
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if take(lock, task.encode()):
                    return lock
            except BlockingIOError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
    return None


def _join(lock: int, task: bytes) -> bool:
    """Lock a file that is this task's already."""
    import fcntl  # absent on Windows, where a Connect client imports this file

    if _owner(lock) != task:
        return False
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return _owner(lock) == task  # another may have begun between


def _begin(lock: int, task: bytes) -> bool:
    """Lock a free file, and make it this task's."""
    import fcntl  # as above

    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(lock, 0)
    if not task:
        return True
    os.pwrite(lock, task, 0)
    # Linux takes the one away before it gives the other; who comes between is the owner then.
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return _owner(lock) == task


def _owner(lock: int) -> bytes:
    return os.pread(lock, 256, 0)
