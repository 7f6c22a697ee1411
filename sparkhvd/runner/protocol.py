"""Frames on the pipes between a task and its trainer process: length-prefixed bytes, two of them with a dataclass as JSON."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

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


# ----------------------------------------------------------------------------------------------------
# Pickle functions and results by value, so that those of `__main__` and of notebook cells travel too.


def cloudpickle() -> Any:
    """Return pyspark's cloudpickle, or else the package of that name."""
    try:
        return importlib.import_module("pyspark.cloudpickle")
    except ImportError:
        return importlib.import_module("cloudpickle")


def dumps(value: object) -> bytes:
    """Pickle by value."""
    data: bytes = cloudpickle().dumps(value)
    return data


def dump_program(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bytes:
    """Pickle a call as (names of modules, fn, args, kwargs, backend).

    The names are those that `fn` is seen to need: where it is pickled by reference, nothing else in the pickle tells of them. The backend is
    that of torch.distributed, where this process has it: who imports it need not name it in `fn`.
    """
    backend = sys.modules.get("sparkhvd.distributed")
    return dumps((_names_in(fn), fn, args, kwargs, backend))


def _inside(fn: Callable[..., object]) -> Callable[..., object] | None:
    """Return the function that an object without code of its own calls, if it says so."""
    if isinstance(fn, functools.partial):
        return fn.func
    return None if hasattr(fn, "__code__") else getattr(fn, "__wrapped__", None)


def _names_in(fn: Callable[..., object]) -> tuple[str, ...]:
    """List names in the code of a function, and the modules that its own module has imported."""
    while (inner := _inside(fn)) is not None:
        fn = inner
    fn = getattr(fn, "__func__", fn)
    names: set[str] = set()
    codes = [code] if isinstance(code := getattr(fn, "__code__", None), CodeType) else []
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if isinstance(module, ModuleType) and module.__name__ != "__main__":  # which no rank imports
        names |= {
            value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)
        }
    return tuple(sorted(names))


# ----------------------------------------------------------------------------------------------------
# Payloads: bytes that a Python function of Spark brings to its tasks, without a file left for each function.
# pyspark makes a broadcast variable of every pickled function above 1 MiB: a file in the driver's `spark.local.dir`, which
# stays until the application ends. So large bytes become a broadcast variable here, and the function that brings them
# stays small. Spark Connect has no such variables: there the bytes stay in the function.
#
# Threads: transforms and launches of any threads may use this at once.

if TYPE_CHECKING:
    from typing import TypeAlias

    from pyspark import Broadcast, SparkContext

    from sparkhvd.spark import SparkShim

    Payload: TypeAlias = bytes | Broadcast[bytes]

# Half of what Spark leaves in a function: it adds its own part.
INLINE_BYTES = 512 << 10
# Broadcast variables that wait for the next function with equal bytes: a pipeline has few stages with a model.
_KEPT = 4


def bytes_of(payload: Payload) -> bytes:
    """Return the bytes of a payload, in a task."""
    return payload if isinstance(payload, bytes) else payload.value


@contextlib.contextmanager
def carried(shim: SparkShim, data: bytes) -> Iterator[Payload]:
    """Yield the payload of bytes that no task needs after the block."""
    if shim.is_connect or len(data) <= INLINE_BYTES:
        yield data
        return
    variable = shim.session.sparkContext.broadcast(data)
    try:
        yield variable
    finally:
        with contextlib.suppress(Exception):  # the application may be over
            variable.destroy()


def kept_carried(shim: SparkShim, data: bytes) -> Payload:
    """Return the payload of bytes that a DataFrame may need at any later time.

    Equal bytes are one broadcast variable as long as they are among the last few; others go when the JVM has no plan
    left that uses them, which is checked at each call.
    """
    if shim.is_connect or len(data) <= INLINE_BYTES:
        return data
    return _variables.get(shim.session.sparkContext, data)


class _Variables:
    """Broadcast variables of one process: those used last, and those that only plans may still use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Broadcast[bytes]] = OrderedDict()
        # Application, file and the JVM's weak reference of each that is not kept: a view, a cache or a stream may
        # use it longer than any object of Python.
        self._left: list[tuple[str, str, Any]] = []

    def get(self, context: SparkContext, data: bytes) -> Broadcast[bytes]:
        """Return the variable of these bytes, by which a function must be pickled before the next garbage collection."""
        application = str(context.applicationId)
        key = (application, hashlib.sha256(data).hexdigest())
        with self._lock:
            self._sweep(application)
            if key not in self._kept:
                self._kept[key] = context.broadcast(data)
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                _, old = self._kept.popitem(last=False)
                jvm: Any = context._jvm
                weak = jvm.java.lang.ref.WeakReference(old._jbroadcast)
                self._left.append((application, old._path, weak))
            return self._kept[key]

    def _sweep(self, application: str) -> None:
        """Delete the files of variables that are no longer used, and of applications that have ended."""
        for key in [k for k in self._kept if k[0] != application]:
            _unlink(self._kept.pop(key)._path)
        left = []
        for owner, path, weak in self._left:
            if owner == application and weak.get() is not None:
                left.append((owner, path, weak))
            else:
                _unlink(path)
        self._left = left


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # Spark has deleted it with its folder
        os.unlink(path)


_variables = _Variables(_KEPT)
