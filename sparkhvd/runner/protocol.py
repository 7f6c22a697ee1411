"""Frames on the pipes between a task and its trainer. The first and the last frame to a trainer are JSON."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from sparkhvd import lazy_compiler
from sparkhvd.wire import LENGTH, read_frame

# Modules that a zygote preloads for a fit. They are slow to import and start no thread, unlike pyarrow.
FIT_MODULES = ("numpy", "torch", "sparkhvd.torch", "pyspark.cloudpickle")
# Modules that a zygote preloads once a rank has imported them.
USEFUL_MODULES = (*FIT_MODULES, lazy_compiler.REAL)
# Threads of numerical libraries; the first is OpenMP's, which torch follows.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# Prefixes of frames for the driver: a part of a message or of metrics, the end of either, and progress. The report
# comes last and is JSON.
_PART, _END_MESSAGE, _END_METRICS, _PROGRESS = b"m", b"M", b"n", b"p"
# Linux's PIPE_BUF: a write of at most this size to a pipe is atomic.
_ATOMIC_BYTES = 4096


@dataclass(frozen=True)
class Prologue:
    """First frame to a trainer: all it needs before the ranks know each other.

    Attributes:
        env: variables to set before anything loads.
        sys_path: the parent's module search path.
        cwd: working directory.
        num_threads: threads for OpenMP, MKL and the like.
        keep_freed_memory: whether the process keeps freed memory for its next allocations.
        lazy_compiler: whether torch's compiler is imported only when something compiles.
        preload: modules to import while the ranks connect; a failure is ignored here.
        gpu_views: sets of variables (None: unset). The process reports the GPUs that it sees under each of them in its
            first frame; empty for no report.
        cuda_library: path of CUDA's driver library; "" for the system's.
        spark_files: root of `SparkFiles`; "" outside Spark.
        listener: file descriptors of the bound listener (TCP, Unix).
        zygote_idle_s: how long an idle zygote that forks the process stays; 0 if no zygote may.
        endpoint: the listener's address, as `Endpoint.to_dict` gives it.
    """

    env: dict[str, str] = field(default_factory=dict)
    sys_path: list[str] = field(default_factory=list)
    cwd: str = ""
    num_threads: int = 1
    keep_freed_memory: bool = False
    lazy_compiler: bool = True
    preload: list[str] = field(default_factory=list)
    gpu_views: list[dict[str, str | None]] = field(default_factory=list)
    cuda_library: str = ""
    spark_files: str = ""
    listener: tuple[int, int] = (-1, -1)
    zygote_idle_s: float = 0.0
    endpoint: dict[str, str | int] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Make the process's variables. Numerical libraries default to `num_threads` threads."""
        return {**dict.fromkeys(THREAD_VARIABLES, str(self.num_threads)), **self.env}

    def to_bytes(self) -> bytes:
        """Payload of a frame."""
        return json.dumps(asdict(self)).encode()


def own_threads(env: Mapping[str, str]) -> int | None:
    """Read the user's OMP_NUM_THREADS from a rank's variables, or return None without a number."""
    first = env.get(THREAD_VARIABLES[0], "").partition(",")[0].strip()  # the rest: nested regions
    return (int(first) or None) if first.isdigit() else None


@dataclass(frozen=True)
class JobFrame:
    """Last frame to a trainer: the ranks of the job. Its repr leaves out the key.

    Attributes:
        job: `Job.to_json()`; for a member of an elastic job its join token, as JSON.
        settings: `JobSettings.to_json()`.
        local_rank: index among this host's ranks.
        attempt: 0 for the first launch.
        gpu: ordinal of the rank's GPU in its process; None without a GPU.
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
        """Payload of a frame."""
        return json.dumps(asdict(self)).encode()


def write_message(fd: int, message: bytes) -> None:
    """Write a message for the driver."""
    _write_parts(fd, message, _END_MESSAGE)


def write_metrics(fd: int, entry: bytes) -> None:
    """Write an entry of `log_metrics`."""
    _write_parts(fd, entry, _END_METRICS)


def _write_parts(fd: int, message: bytes, end: bytes) -> None:
    """Write atomic frames, so that an exception of a signal handler splits no frame."""
    room = _ATOMIC_BYTES - LENGTH.size - len(_PART)
    try:
        for start in range(0, len(message), room):
            part = _PART + message[start : start + room]
            os.write(fd, LENGTH.pack(len(part)) + part)
    finally:
        os.write(fd, LENGTH.pack(len(end)) + end)


def write_progress(fd: int, text: bytes) -> None:
    """Write a line about the training's progress, in one write."""
    frame = _PROGRESS + text[: _ATOMIC_BYTES - LENGTH.size - len(_PROGRESS)]
    os.write(fd, LENGTH.pack(len(frame)) + frame)


def read_report(
    fd: int,
    take: Callable[[bytes], None],
    metrics: Callable[[bytes], None],
    progress: Callable[[bytes], None],
) -> bytes | None:
    """Read up to the report, passing on messages, metrics and progress, or return None if the writer is gone."""
    message = b""
    while (frame := read_frame(fd)) is not None:
        if frame.startswith(_PART):
            message += frame[len(_PART) :]
        elif frame in (_END_MESSAGE, _END_METRICS):
            (take if frame == _END_MESSAGE else metrics)(message)
            message = b""
        elif frame.startswith(_PROGRESS):
            progress(frame[len(_PROGRESS) :])
        else:
            return frame
    return None


# ----------------------------------------------------------------------------------------------------
# Pickle functions and results by value, so that definitions of `__main__` and of notebook cells travel too.


def cloudpickle() -> Any:
    """Import pyspark's cloudpickle, or else the package of that name."""
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

    The names are those that `fn` refers to: if it is pickled by reference, the pickle does not contain them. The
    backend is `sparkhvd.distributed` if this process has imported it: then `fn` need not import it.
    """
    backend = sys.modules.get("sparkhvd.distributed")
    return dumps((_names_in(fn), fn, args, kwargs, backend))


# Most parts tried per container, and most steps of a path.
_MOST_PARTS, _DEEPEST = 1_000, 32


def failing_path(value: object, fails: Callable[[object], bool]) -> str:
    """Name the innermost unpicklable part as a path: ".encoder.lock" or ": variable 'lock'".

    "" if it is the value itself.

    Args:
        value: any object.
        fails: returns True if an object cannot be pickled.
    """
    path, seen = "", [value]
    for _ in range(_DEEPEST):
        for step, part in itertools.islice(_parts(value), _MOST_PARTS):
            if not any(part is each for each in seen) and fails(part):
                path, value = path + step, part
                seen.append(part)
                break
        else:
            break
    return path


def unpicklable(value: object) -> bool:
    """Whether an object cannot be pickled by value."""
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - pickling runs methods of the user's classes
        return True
    return False


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the pickled parts of an object, each with its step of a path."""
    if isinstance(value, dict):
        yield from ((f"[{key!r:.50}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", each) for i, each in enumerate(value))
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from ((f".{name}", each) for name, each in parts.items())
    elif isinstance(value, FunctionType):
        yield from ((f": variable {name!r}", each) for name, each in _variables_of(value))
        yield from ((f".{name}", each) for name, each in vars(value).items())
    elif isinstance(value, type):
        members = ((n, getattr(m, "__func__", m)) for n, m in list(vars(value).items()))
        yield from ((f".{name}", each) for name, each in members if not name.startswith("__"))
    elif not isinstance(value, (ModuleType, CodeType)):
        yield from _attributes_of(value)


def _variables_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the pickled variables of a function: of its closure, its defaults, and the globals in its code."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _names_in(function):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _attributes_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield the state and the arguments in an object's pickle. Modules of torch have their parts by name."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - it is the part that fails
        return
    _, arguments, state = (*reduced, None)[:3] if isinstance(reduced, tuple) else ((), (), None)
    for part in state if isinstance(state, tuple) else (state,):  # with `__slots__` there are two
        for name, each in part.items() if isinstance(part, dict) else ():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(each, dict):
                yield from ((f".{inner}", module) for inner, module in each.items())
            else:
                yield f".{name}", each
    yield from (("", each) for each in arguments)


def _inside(fn: Callable[..., object]) -> Callable[..., object] | None:
    """Unwrap a partial or another wrapper by one level, or return None without a wrapper."""
    if isinstance(fn, functools.partial):
        return fn.func
    return None if hasattr(fn, "__code__") else getattr(fn, "__wrapped__", None)


def _names_in(fn: Callable[..., object]) -> tuple[str, ...]:
    """List the names in a function's code, and the modules imported by its own module."""
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
# Payloads: bytes that a Python function of Spark brings to its tasks, without leaving a file per function. pyspark
# writes every pickled function above 1 MiB as a broadcast variable: a file in the driver's `spark.local.dir`, which
# stays until the application ends. So large bytes become a broadcast variable here, and the function stays small. Spark
# Connect has no broadcast variables: there the bytes stay in the function.
#
# Threads: safe from any thread.

if TYPE_CHECKING:
    from typing import TypeAlias

    from pyspark import Broadcast, SparkContext

    from sparkhvd.spark import SparkShim

    Payload: TypeAlias = bytes | Broadcast[bytes]

# Half of Spark's limit for a function, to which Spark adds its own part.
INLINE_BYTES = 512 << 10
# How many broadcast variables to keep for later functions with equal bytes. Four are enough: a pipeline has few stages
# with a model.
_KEPT = 4


def bytes_of(payload: Payload) -> bytes:
    """Read the bytes of a payload, in a task."""
    return payload if isinstance(payload, bytes) else payload.value


@contextlib.contextmanager
def carried(shim: SparkShim, data: bytes) -> Iterator[Payload]:
    """Yield a payload for tasks inside the block only."""
    if shim.is_connect or len(data) <= INLINE_BYTES:
        yield data
        return
    variable = shim.session.sparkContext.broadcast(data)
    try:
        yield variable
    finally:
        with contextlib.suppress(Exception):  # the application may have ended
            variable.destroy()


def kept_carried(shim: SparkShim, data: bytes) -> Payload:
    """Create a payload that lives as long as any plan may use it.

    A DataFrame may need it at any later time. Equal bytes share a broadcast variable while they are among the last few.
    Each call deletes older variables that no plan of the JVM uses.
    """
    if shim.is_connect or len(data) <= INLINE_BYTES:
        return data
    return _variables.get(shim.session.sparkContext, data)


class _Variables:
    """Broadcast variables of this process: the last used, and older variables possibly in use."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Broadcast[bytes]] = OrderedDict()
        # Application, file and the JVM's weak reference of each older variable: a view, a cache or a stream may
        # use it longer than any Python object.
        self._left: list[tuple[str, str, Any]] = []

    def get(self, context: SparkContext, data: bytes) -> Broadcast[bytes]:
        """Get the broadcast variable of some bytes.

        Pickle its function before the next garbage collection.
        """
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
        """Delete the files of unused variables and of ended applications."""
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
