"""The trainer: a fresh process that runs the user's function as one rank.

It is started as `python -m sparkhvd.runner.child SPEC_FD RESULT_FD` by `trainer.Trainer`, and talks with its parent
through two pipes. On the first it receives three frames: the prologue (environment, paths), the program (pickled
function and arguments) and, when all ranks have found each other, the job. Start-up and imports overlap with the
ranks finding each other. On the second it sends which GPUs it sees if it is asked, when the function began, how it
ended, and its result.

**Threads**: the main thread runs the user's function, so signals and `asyncio` behave as in a script. One daemon
thread reads the first pipe to its end. **Ownership**: both pipes belong to this process only; they are not
inherited by what the user starts, except through a bare fork. **Shutdown**: the end of the first pipe means that
the parent is gone; then the whole process group is killed, so that data loader processes go too.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import faulthandler
import importlib
import io
import json
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sparkhvd.runner import allocator, spawning
from sparkhvd.runner.gpu import decide, probe

__all__ = [
    "JobFrame",
    "Prologue",
    "dump_program",
    "early_call",
    "read_frame",
    "thread_variables",
    "write_frame",
]

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Prologue:
    """What the trainer can use before the ranks know each other; crosses as JSON.

    Attributes:
        env: variables to set before anything loads.
        sys_path: the parent's module search path.
        cwd: working directory.
        num_threads: threads for OpenMP, MKL and the like.
        keep_freed_memory: whether the process keeps what it frees, for its next allocations.
        preload: modules to import while the ranks find each other; a failure is ignored here.
        early: what to call before that, see `early_call`; "" for nothing.
        neighbours: (number of this process among those that Spark says are on its host, how many they are).
        gpu_views: variables (None: unset) with which the process is to say which GPUs it sees, one answer for each, as
            its first frame; none for no question.
        cuda_library: of CUDA's driver; "" for the system's.
        spark_files: root of `SparkFiles`; "" outside Spark.
        listener: file descriptors of the bound listener (TCP, Unix).
        endpoint: the listener's address, as `Endpoint.to_dict` gives it.
    """

    env: dict[str, str] = field(default_factory=dict)
    sys_path: list[str] = field(default_factory=list)
    cwd: str = ""
    num_threads: int = 1
    keep_freed_memory: bool = False
    preload: list[str] = field(default_factory=list)
    early: str = ""
    neighbours: tuple[int, int] = (0, 1)
    gpu_views: list[dict[str, str | None]] = field(default_factory=list)
    cuda_library: str = ""
    spark_files: str = ""
    listener: tuple[int, int] = (-1, -1)
    endpoint: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """This as a frame's payload."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class JobFrame:
    """Who the ranks are; crosses as JSON. Holds the key, so it has no readable repr.

    Attributes:
        job: `Job.to_json()`.
        settings: `JobSettings.to_json()`.
        local_rank: index among this host's ranks.
        attempt: 0 for the first launch.
        gpu: the rank's GPU as CUDA counts in its process; None where it was given none.
        env: the standard torch variables, and which GPUs the process sees where that depends on the other ranks.
    """

    job: str = field(repr=False)
    settings: str = field(repr=False)
    local_rank: int = 0
    attempt: int = 0
    gpu: int | None = None
    env: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """This as a frame's payload."""
        return json.dumps(asdict(self)).encode()


# --- frames -------------------------------------------------------------------------------------------------


def write_frame(fd: int, payload: bytes) -> None:
    """Write one length-prefixed frame; BrokenPipeError when the reader is gone."""
    for part in (_LENGTH.pack(len(payload)), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def read_frame(fd: int) -> bytes | None:
    """Read one frame; None when the writer is gone."""
    header = _read_exactly(fd, _LENGTH.size)
    return None if header is None else _read_exactly(fd, _LENGTH.unpack(header)[0])


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = os.read(fd, min(left, _READ_BYTES))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


# --- the program --------------------------------------------------------------------------------------------


def cloudpickle() -> Any:
    """The cloudpickle of pyspark, else the one on its own."""
    try:
        return importlib.import_module("pyspark.cloudpickle")
    except ImportError:
        return importlib.import_module("cloudpickle")


def _dumps(value: Any) -> bytes:
    data: bytes = cloudpickle().dumps(value)
    return data


def dump_program(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call by value, so that functions of `__main__` and of notebook cells travel too."""
    return _dumps((fn, args, kwargs))


def early_call(fn: Callable[[int, int], object] | None) -> str:
    """A call with `Prologue.neighbours` as text for `Prologue.early`; "" for None."""
    return "" if fn is None else base64.b64encode(cloudpickle().dumps(fn)).decode()


def thread_variables(num_threads: int) -> dict[str, str]:
    """The variables that bound the threads of numerical libraries."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, str(num_threads))


# --- in the trainer process ---------------------------------------------------------------------------------


def main(spec_fd: int, result_fd: int) -> int:
    """Run one rank; returns the exit status."""
    for fd in (spec_fd, result_fd):
        os.set_inheritable(fd, False)
    _reset_signals()
    faulthandler.enable()
    _line_buffer()
    began = time.monotonic()
    header, program = read_frame(spec_fd), read_frame(spec_fd)
    if header is None or program is None:
        return 0  # the parent gave up before it had anything to run
    prologue = Prologue(**json.loads(header))
    _enter(prologue)
    # The listener must survive until the job is known, and must not leak into what the user starts.
    for fd in prologue.listener:
        if fd >= 0:
            os.set_inheritable(fd, False)
    first = _FirstFrame(result_fd)
    if prologue.gpu_views:  # before anything starts a thread
        probe.ask(prologue.cuda_library, prologue.gpu_views, first.send)
    _begin(prologue)
    _preload(prologue.preload)
    payload = read_frame(spec_fd)
    if payload is None:
        return 0  # preflight failed; the task reports it
    job = JobFrame(**json.loads(payload))
    if prologue.gpu_views:  # nobody waits for an answer any more
        first.send(b"null")
    _watch_parent(spec_fd)
    _install(prologue, job)
    spawning.pickle_main_by_value(_dumps)
    return _run(program, result_fd, began)


def _reset_signals() -> None:
    """Undo what the parent's parent has ignored or masked: both pass through exec."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _line_buffer() -> None:
    """Pass every line on when it is printed: a killed rank would take a full buffer with it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _enter(prologue: Prologue) -> None:
    if prologue.keep_freed_memory:
        allocator.keep_freed_memory()
    variables = {**thread_variables(prologue.num_threads), **prologue.env}
    os.environ.update(variables)  # noqa: TID251 - OpenMP's, and the user's own
    if prologue.sys_path:
        sys.path[:] = prologue.sys_path
    if prologue.cwd:
        os.chdir(prologue.cwd)
    sys.argv[1:] = []


class _FirstFrame:
    """The first frame that the parent reads where it has asked for the GPUs: sent once, whoever is the first.

    CUDA's driver may answer when the parent has given up and the function runs; that answer would be taken for a part of
    the outcome.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._is_sent = False

    def send(self, payload: bytes) -> None:
        with self._lock:
            if self._is_sent:
                return
            self._is_sent = True
            with contextlib.suppress(BrokenPipeError):
                write_frame(self._fd, payload)


def _begin(prologue: Prologue) -> None:
    if prologue.early:
        # A head start: who needs what it has begun finds out what went wrong.
        with contextlib.suppress(Exception):
            cloudpickle().loads(base64.b64decode(prologue.early))(*prologue.neighbours)


def _preload(modules: list[str]) -> None:
    for name in modules:
        # Whether it is needed, and what its absence means, is for the user's function to say.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _watch_parent(fd: int) -> None:
    def kill_group_at_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 1):
                pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=kill_group_at_end, name="sparkhvd-parent", daemon=True).start()
    import fcntl  # absent on Windows, where a Connect client may import this file

    # The kernel does the same by itself, which also ends a rank whose native code keeps the GIL.
    # F_SETSIG and a negative owner (a process group) are Linux's; elsewhere the thread has to do.
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _install(prologue: Prologue, frame: JobFrame) -> None:
    """Make rank and rendezvous known in this process."""
    from sparkhvd import rank_context, rendezvous
    from sparkhvd.settings import JobSettings, RankSettings

    env, gpu = _visible(frame, prologue.cuda_library)
    os.environ.update(env)  # noqa: TID251 - torch's and CUDA's own
    settings = RankSettings(JobSettings.from_json(frame.settings))
    job = rendezvous.Job.from_json(frame.job)
    endpoint = rendezvous.Endpoint.from_dict(prologue.endpoint)
    listener = rendezvous.Listener.from_filenos(*prologue.listener, endpoint)
    rendezvous.install(rendezvous.SocketRendezvous(job, listener, settings.current))
    place = rank_context.RankContext(
        job.rank, job.size, frame.local_rank, frame.attempt, prologue.num_threads, gpu
    )
    rank_context.install(place)
    if prologue.spark_files:
        with contextlib.suppress(ImportError):
            from pyspark import SparkFiles

            # What pyspark's own worker sets, so that SparkFiles.get answers in the user's function.
            SparkFiles._root_directory = prologue.spark_files
            SparkFiles._is_running_on_worker = True


def _visible(frame: JobFrame, cuda_library: str) -> tuple[dict[str, str], int | None]:
    """The frame's variables, and the rank's GPU as CUDA counts with them.

    What was imported meanwhile does not start CUDA, as far as torch's versions are known. Where one does, the process goes
    on to see its own GPU only, because CUDA has read which.
    """
    env = dict(frame.env)
    if decide.VISIBLE not in env or not probe.has_started(cuda_library):
        return env, frame.gpu
    del env[decide.VISIBLE]
    return env, 0


def _run(program: bytes, result_fd: int, began: float) -> int:
    started_at, started = time.time(), time.monotonic()
    write_frame(result_fd, json.dumps({"started_at": started_at}).encode())
    result = b""
    try:
        value = _call(program)
        result = _dump_result(value)
        report: dict[str, Any] = {"kind": "ok", "exit": "ok"}
    except SystemExit as e:
        report = _report_of_exit(e)
        result = _dump_result(None) if report["kind"] == "ok" else b""
    except BaseException as e:  # noqa: BLE001 - door: whatever the function raises becomes data
        report = _report_of(e)
    report["started_at"] = started_at
    report["run_s"] = time.monotonic() - started
    report["peak_rss_bytes"] = _peak_rss()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(BrokenPipeError):
        write_frame(result_fd, json.dumps(report).encode())
        write_frame(result_fd, result)
    return 0 if report["kind"] == "ok" else 1


def _call(program: bytes) -> Any:
    pid = os.getpid()
    try:
        # The driver's closure: this process exists to run it.
        fn, args, kwargs = pickle.loads(program)  # noqa: S301
        value = fn(*args, **kwargs)
    except BaseException as e:  # noqa: BLE001 - door: whatever the function raises becomes data
        if os.getpid() != pid:
            _end_forked(e)
        raise
    if os.getpid() != pid:
        _end_forked(None)
    return value


def _end_forked(error: BaseException | None) -> NoReturn:
    """End a process that the function has forked and let run on, as Python would: it is not the rank."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        report = _report_of_exit(error)
        status = int(report["exit"].removeprefix("exit ").replace("ok", "0"))
        sys.stderr.write(report.get("message", ""))
    elif error is not None:
        sys.stderr.write(_traceback_of(error))
    with contextlib.suppress(Exception):
        _flush()
    os._exit(status & 0xFF)


class _UnpicklableResultError(TypeError):
    """What a function returned cannot travel to the driver."""


def _dump_result(value: Any) -> bytes:
    try:
        return _dumps(value)
    except Exception as e:  # noqa: BLE001 - as above
        kind = type(value)
        raise _UnpicklableResultError(
            f"the function returned a {kind.__module__}.{kind.__qualname__}, which cannot be pickled "
            f"({type(e).__name__}: {e}). Return plain data such as numbers, lists or tensors."
        ) from e


def _report_of_exit(error: SystemExit) -> dict[str, Any]:
    if error.code is None or error.code == 0:
        return {"kind": "ok", "exit": "ok"}
    code = error.code if isinstance(error.code, int) else 1
    message = "" if isinstance(error.code, int) else str(error.code)
    return {"kind": "exit", "exit": f"exit {code}", "error": "SystemExit", "message": message}


def _report_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, _UnpicklableResultError):  # its message says all; the frames are ours
        message = str(error)
        return {"kind": "exception", "exit": "exception", "error": "TypeError", "message": message}
    kind = type(error)
    plain = kind.__module__ == "builtins"
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    return {
        "kind": "collective" if _is_consequence(error) else "exception",
        "exit": "exception",
        "error": name,
        "message": _text_of(error),
        "traceback": _traceback_of(error),
    }


def _is_consequence(error: BaseException) -> bool:
    """Whether an exception exists only because another rank was lost."""
    from sparkhvd.errors import CollectiveError, NotInitializedError

    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, CollectiveError) and not isinstance(current, NotInitializedError):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001 - as above
        return f"(its message cannot be shown: {type(e).__name__})"


def _traceback_of(error: BaseException) -> str:
    """The traceback without this file's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception as e:  # noqa: BLE001 - as above
        return f"{type(error).__name__} (its traceback cannot be shown: {type(e).__name__})"


def _peak_rss() -> int:
    """Largest resident memory of this process in bytes; 0 when the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def end(status: int, parent: int) -> NoReturn:
    """End this process as a script would, without taking the interpreter apart.

    With torch loaded that takes 0.3 s, and can do nothing but crash: what users rely on at exit has run by then.

    Args:
        status: exit status.
        parent: the process that has started this one.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            step()
    if (
        os.getppid() != parent
    ):  # which would have ended the others of the group; killed in the grace of an interrupt
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # what native libraries have printed


def loader_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those variables that only work when they are there before the process starts."""
    prefixes = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")
    return {name: value for name, value in env.items() if name.startswith(prefixes)}


if __name__ == "__mp_main__":  # in a process that multiprocessing spawns from a trainer
    spawning.pickle_main_by_value(_dumps)
if __name__ == "__main__":
    started_by = os.getppid()
    end(main(int(sys.argv[1]), int(sys.argv[2])), started_by)
