"""Frames on the pipes between a task and its trainer process: length-prefixed bytes, two of them with a dataclass as JSON."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

__all__ = [
    "USEFUL_MODULES",
    "JobFrame",
    "Prologue",
    "frame_of",
    "read_frame",
    "read_report",
    "take_frame",
    "write_frame",
    "write_message",
    "write_progress",
]

# Modules that a nursery may import for the trainers that need them. They are slow, and start no thread: pyarrow does.
USEFUL_MODULES = ("numpy", "torch", "torch._dynamo", "sparkhvd.torch", "pyspark.cloudpickle")
# Begin frames for the driver: a part of a message, its end, and progress. The report, which follows the last, is JSON.
_PART, _END, _PROGRESS = b"m", b"M", b"p"
# Linux's PIPE_BUF.
_ATOMIC_BYTES = 4096

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Prologue:
    """First frame to a trainer: everything that it can use before the ranks know each other.

    Attributes:
        env: variables to set before anything loads.
        sys_path: the parent's module search path.
        cwd: working directory.
        num_threads: threads for OpenMP, MKL and the like.
        keep_freed_memory: whether the process keeps freed memory for its next allocations.
        preload: modules to import while the ranks find each other; a failure is ignored here.
        gpu_views: sets of variables (None: unset) for each of which the process reports the GPUs that it sees, all in its
            first frame; empty for no report.
        cuda_library: path of CUDA's driver library; "" for the system's.
        spark_files: root of `SparkFiles`; "" outside Spark.
        listener: file descriptors of the bound listener (TCP, Unix).
        nursery: whether a nursery may fork the process.
        endpoint: the listener's address, as `Endpoint.to_dict` gives it.
    """

    env: dict[str, str] = field(default_factory=dict)
    sys_path: list[str] = field(default_factory=list)
    cwd: str = ""
    num_threads: int = 1
    keep_freed_memory: bool = False
    preload: list[str] = field(default_factory=list)
    gpu_views: list[dict[str, str | None]] = field(default_factory=list)
    cuda_library: str = ""
    spark_files: str = ""
    listener: tuple[int, int] = (-1, -1)
    nursery: bool = False
    endpoint: dict[str, str | int] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return the variables of the process; by default numerical libraries have `num_threads` threads."""
        names = (
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "NUMEXPR_NUM_THREADS",
        )
        return {**dict.fromkeys(names, str(self.num_threads)), **self.env}

    def to_bytes(self) -> bytes:
        """Return the payload of a frame."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class JobFrame:
    """Last frame to a trainer: the ranks of the job. Holds the key, so its repr leaves it out.

    Attributes:
        job: `Job.to_json()`; of a member of an elastic job its invitation, as JSON.
        settings: `JobSettings.to_json()`.
        local_rank: index among this host's ranks.
        attempt: 0 for the first launch.
        gpu: ordinal of the rank's GPU in its process; None if it has none.
        env: the standard torch variables, and the visible GPUs where they depend on the other ranks.
        is_elastic: whether the rank is a member of an elastic job.
    """

    job: str = field(repr=False)
    settings: str = field(repr=False)
    local_rank: int = 0
    attempt: int = 0
    gpu: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    is_elastic: bool = False

    def to_bytes(self) -> bytes:
        """Return the payload of a frame."""
        return json.dumps(asdict(self)).encode()


def frame_of(payload: bytes) -> bytes:
    """Return a frame as `write_frame` writes it, for a socket."""
    return _LENGTH.pack(len(payload)) + payload


def write_frame(fd: int, payload: bytes) -> None:
    """Write one length-prefixed frame; BrokenPipeError when the reader is gone."""
    for part in (_LENGTH.pack(len(payload)), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def write_message(fd: int, message: bytes) -> None:
    """Write a message for the driver, in frames that are one write each: an exception of a signal's handler tears none of them."""
    room = _ATOMIC_BYTES - _LENGTH.size - len(_PART)
    try:
        for start in range(0, len(message), room):
            part = _PART + message[start : start + room]
            os.write(fd, _LENGTH.pack(len(part)) + part)
    finally:
        os.write(fd, _LENGTH.pack(len(_END)) + _END)


def write_progress(fd: int, text: bytes) -> None:
    """Write a line on the progress of the training, in one write."""
    frame = _PROGRESS + text[: _ATOMIC_BYTES - _LENGTH.size - len(_PROGRESS)]
    os.write(fd, _LENGTH.pack(len(frame)) + frame)


def read_report(
    fd: int, take: Callable[[bytes], None], progress: Callable[[bytes], None]
) -> bytes | None:
    """Read frames up to the report, and pass messages and progress before it on; None when the writer is gone."""
    message = b""
    while (frame := read_frame(fd)) is not None:
        if frame.startswith(_PART):
            message += frame[len(_PART) :]
        elif frame == _END:
            take(message)
            message = b""
        elif frame.startswith(_PROGRESS):
            progress(frame[len(_PROGRESS) :])
        else:
            return frame
    return None


def read_frame(fd: int) -> bytes | None:
    """Read one frame; None when the writer is gone."""
    header = _read_exactly(fd, _LENGTH.size)
    return None if header is None else _read_exactly(fd, _LENGTH.unpack(header)[0])


def take_frame(came: bytearray) -> bytes | None:
    """Take the first frame off the bytes that have come; None if it is not whole yet."""
    if len(came) < _LENGTH.size:
        return None
    end = _LENGTH.size + int(_LENGTH.unpack_from(came)[0])
    if len(came) < end:
        return None
    with memoryview(came) as view:
        frame = bytes(view[_LENGTH.size : end])
    del came[:end]
    return frame


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = os.read(fd, min(left, _READ_BYTES))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
