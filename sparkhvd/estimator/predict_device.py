"""Where a Python worker computes in `TorchModel.transform`: the GPU of its Spark task, or the CPU.

The worker is Spark's, and serves other tasks later, so CUDA_VISIBLE_DEVICES stays as it is: the address of a GPU is its
number in the process. Every process that uses a GPU takes a few hundred MB of it, so on a host only so many compute on
one at a time; the others wait for a lock file, which the kernel frees when its holder ends, whatever the reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkhvd.errors import InvalidArgumentError

__all__ = ["NO_GPUS", "PROCESSES_PER_GPU", "TaskGpus", "choose", "held"]

# Tasks of a host that compute on one GPU at a time; more would only share its time and take its memory.
PROCESSES_PER_GPU = 4
# The longest wait for them. They are alive, or their locks were free; so this is for tasks that never end.
WAIT_S = 3600.0
_POLL_S = 0.05


@dataclass(frozen=True)
class TaskGpus:
    """What Spark says of the task.

    Attributes:
        addresses: of its GPUs.
        partition: its number.
    """

    addresses: tuple[str, ...] = ()
    partition: int = 0


NO_GPUS = TaskGpus()


def choose(use_gpu: bool | None, task: TaskGpus) -> torch.device:
    """The device of this task.

    Args:
        use_gpu: the Param; None is a GPU where Spark gave the task one, and torch is built for any.
        task: what Spark says of it.

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
    """The number that torch gives the GPU with an address: the address itself, or that of the GPU with this UUID."""
    if address.isdigit():
        return int(address) if int(address) < count else None
    for index in range(count):
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        if uuid and uuid in address:
            return index
    return None


@contextlib.contextmanager
def held(
    device: torch.device,
    *,
    limit: int = PROCESSES_PER_GPU,
    wait_s: float = WAIT_S,
    folder: Path | None = None,
) -> Iterator[None]:
    """Be one of at most `limit` processes of this host that compute on a device inside the block; the CPU is free.

    Raises:
        TimeoutError: the others did not end in `wait_s` seconds.
    """
    if device.type == "cpu":
        yield
        return
    folder = folder or Path(tempfile.gettempdir(), f"sparkhvd-gpus-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while (lock := _lock(folder, device, limit)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"transform: {limit} other processes of this host have computed on {device} for {wait_s:g} s. Give "
                "tasks a larger share by spark.task.resource.gpu.amount, or set use_gpu=False on the model."
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, device: torch.device, limit: int) -> int | None:
    import fcntl  # absent on Windows, where a Connect client imports this file

    for number in range(limit):
        path = folder / f"{device.index}-{number}.lock"
        # The folder for temporary files is everybody's: no link of another user's is followed.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return lock
    return None
