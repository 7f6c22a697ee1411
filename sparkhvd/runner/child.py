"""Trainer process: runs the user's function as one rank in a fresh interpreter.

`trainer.Trainer` starts it as `python -m sparkhvd.runner.child SPEC_FD RESULT_FD`. It communicates with its parent
through two pipes. On the first it receives three frames: the prologue (environment, paths), the program (pickled
function and arguments) and, once the addresses of all ranks are known, the job. Start-up and imports overlap with that
wait. On the second it sends the GPUs that it sees, if the prologue requests them, the start of the function, messages
for the driver, its report, and its result.

**Threads**: the main thread runs the user's function, so signals and `asyncio` behave as in a script. One daemon
thread reads the first pipe to its end. **Ownership**: both pipes belong to this process only; the user's
processes inherit them only through a bare fork. **Shutdown**: the end of the first pipe means that
the parent is gone; then the whole process group is killed, including data loader processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

from sparkhvd import as_horovod, lazy_compiler, rank_messages
from sparkhvd.launchers.bootstrap import Handover
from sparkhvd.launchers.rank_claim import hold
from sparkhvd.runner import allocator
from sparkhvd.runner.gpu import probe
from sparkhvd.runner.protocol import (
    USEFUL_MODULES,
    JobFrame,
    Prologue,
    dumps,
    write_message,
    write_metrics,
    write_progress,
)
from sparkhvd.runner.reports import dump_result, peak_rss, report_of, report_of_exit, traceback_of
from sparkhvd.settings import setting_variables
from sparkhvd.topology import HOROVOD_NAMES
from sparkhvd.wire import read_frame, read_json, rebuild, write_frame

_PR_SET_NAME = 15


def main(spec_fd: int, result_fd: int, listener: Sequence[int] | None = None) -> int:
    """Run one rank and return the exit status.

    Args:
        spec_fd: descriptor of the frames to this process.
        result_fd: descriptor of the frames from it.
        listener: in a fork, the received descriptors of the listener, whose numbers differ from the prologue's.
    """
    _name()
    for fd in (spec_fd, result_fd):
        os.set_inheritable(fd, False)
    _reset_signals()
    faulthandler.enable()
    _line_buffer()
    began = time.monotonic()
    header, program = read_frame(spec_fd), read_frame(spec_fd)
    if header is None or program is None:
        return 0  # the parent gave up before it sent a program
    prologue = rebuild(Prologue, read_json(header))
    _enter(prologue)
    as_horovod.install_if_asked()
    if listener is not None:
        prologue = replace(prologue, listener=_numbered(prologue.listener, listener))
        restore_threads()
    # The listener must survive until the job is known, and must not leak into the user's own processes.
    for fd in prologue.listener:
        if fd >= 0:
            os.set_inheritable(fd, False)
    first = _FirstFrame(result_fd)
    if prologue.gpu_views:  # before anything starts a thread
        probe.ask(prologue.cuda_library, prologue.gpu_views, first.send)
    load(prologue.preload)
    if prologue.sys_path:  # after the imports, or the user's folders would shadow Python's modules
        sys.path[:] = prologue.sys_path
        load(prologue.preload)  # modules that only these folders have
    payload = read_frame(spec_fd)
    if payload is None:
        return 0  # preflight failed; the task reports it
    job = rebuild(JobFrame, read_json(payload))
    if prologue.gpu_views:  # the parent no longer waits for an answer
        first.send(b"null")
    _watch_parent(spec_fd)
    _install(prologue, job)
    pickle_main_by_value(dumps)
    return _run(program, result_fd, began)


def _name() -> None:
    """Name the process: a fork has the command line of its zygote."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"sparkhvd-rank", 0, 0, 0)


def _numbered(listener: tuple[int, int], given: Sequence[int]) -> tuple[int, int]:
    """Renumber the listener's descriptors with the received ones, in order."""
    numbers = iter(given)
    tcp, unix = (next(numbers) if fd >= 0 else fd for fd in listener)
    return tcp, unix


def _reset_signals() -> None:
    """Undo ignored and masked signals, because both survive exec."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _line_buffer() -> None:
    """Flush every printed line: a killed rank would lose a full buffer."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _enter(prologue: Prologue) -> None:
    if prologue.keep_freed_memory:
        allocator.keep_freed_memory()
    if prologue.lazy_compiler:
        lazy_compiler.install()
    else:
        lazy_compiler.remove()  # the zygote has installed it
    os.environ.update(prologue.variables())  # noqa: TID251 - OpenMP's, and the user's own
    if prologue.cwd:
        os.chdir(prologue.cwd)
    sys.argv[1:] = []


class _FirstFrame:
    """First frame to the parent, if the parent has requested the GPUs. Later frames are dropped.

    CUDA's driver may answer after the parent has given up and the function runs. That answer would be read as part of
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


def load(modules: Sequence[str]) -> None:
    """Import the available modules, with garbage collection off to save a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    for name in modules:
        # The user's function imports it again, and raises the error if it matters.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if was_enabled:
        gc.enable()


def _watch_parent(fd: int) -> None:
    def kill_group_at_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 1):
                pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=kill_group_at_end, name="sparkhvd-parent", daemon=True).start()
    import fcntl  # absent on Windows, where a Connect client may import this file

    # The kernel does the same itself, which also ends a rank whose native code holds the GIL.
    # F_SETSIG and a negative owner (a process group) exist on Linux only; elsewhere the thread must suffice.
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _install(prologue: Prologue, frame: JobFrame) -> None:
    """Install rank and rendezvous in this process."""
    env, gpu = _visible(frame, prologue.cuda_library)
    variables = os.environ  # noqa: TID251 - Horovod's, torch's and CUDA's own
    for name in HOROVOD_NAMES:  # inherited if a rank has started this job
        variables.pop(name, None)
    variables.update(env)
    handover = Handover(
        frame.job,
        prologue.endpoint,
        prologue.listener,
        frame.local_rank,
        prologue.num_threads,
        is_elastic=frame.is_elastic,
        settings=frame.settings,
        before=setting_variables(),
        gpu=gpu,
    )
    listener = handover.listen()
    handover.enter(listener)
    hold(handover, listener)
    if prologue.spark_files:
        with contextlib.suppress(ImportError):
            from pyspark import SparkFiles

            # Like pyspark's own worker, so that SparkFiles.get works in the user's function.
            SparkFiles._root_directory = prologue.spark_files
            SparkFiles._is_running_on_worker = True


def _visible(frame: JobFrame, cuda_library: str) -> tuple[dict[str, str], int | None]:
    """Return the frame's variables, and the ordinal of the rank's GPU under them.

    Imports do not initialize CUDA in any known version of torch. If an import has, the process continues to see only
    its own GPU, because CUDA has read the variable.
    """
    env = dict(frame.env)
    if probe.VISIBLE not in env or not probe.has_started(cuda_library):
        return env, frame.gpu
    del env[probe.VISIBLE]
    return env, 0


def _run(program: bytes, result_fd: int, began: float) -> int:
    started_at, started = time.time(), time.monotonic()
    write_frame(result_fd, json.dumps({"started_at": started_at}).encode())
    messages = _Messages(result_fd)
    rank_messages.install(messages)
    result = b""
    try:
        value = _call(program)
        result = dump_result(value)
        report: dict[str, Any] = {"kind": "ok", "exit": "ok"}
    except SystemExit as e:
        report = report_of_exit(e)
        result = dump_result(None) if report["kind"] == "ok" else b""
    except BaseException as e:  # noqa: BLE001 - every exception of the function becomes data
        report = report_of(e, __file__)
    report["started_at"] = started_at
    report["run_s"] = time.monotonic() - started
    report["peak_rss_bytes"] = peak_rss()
    report["modules"] = [name for name in USEFUL_MODULES if name in sys.modules]
    _flush_streams()
    messages.close()
    with contextlib.suppress(BrokenPipeError):
        write_frame(result_fd, json.dumps(report).encode())
        write_frame(result_fd, result)
    return 0 if report["kind"] == "ok" else 1


class _Messages:
    """Messages for the driver, on the result pipe before the report."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # A signal handler may send during a write.
        self._lock = threading.RLock()
        self._is_closed = False

    def message(self, text: bytes) -> bool:
        """Send a message and return False if the report was sent, or the reader is gone."""
        return self._write(write_message, text)

    def metrics(self, entry: bytes) -> bool:
        """Send an entry of `log_metrics` and return False likewise."""
        return self._write(write_metrics, entry)

    def progress(self, text: bytes) -> bool:
        """Send a line about the training's progress and return False likewise."""
        return self._write(write_progress, text)

    def _write(self, write: Callable[[int, bytes], None], data: bytes) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            with contextlib.suppress(BrokenPipeError):
                write(self._fd, data)
                return True
        return False

    def close(self) -> None:
        """Refuse further messages, and wait for a pending write."""
        with self._lock:
            self._is_closed = True


def _call(program: bytes) -> Any:
    pid = os.getpid()
    try:
        # The driver's closure: this process exists to run it.
        _, fn, args, kwargs, _ = pickle.loads(program)  # noqa: S301
        value = fn(*args, **kwargs)
    except BaseException as e:  # noqa: BLE001 - every exception of the function becomes data
        if os.getpid() != pid:
            _end_forked(e)
        raise
    if os.getpid() != pid:
        _end_forked(None)
    return value


def _end_forked(error: BaseException | None) -> NoReturn:
    """End a forked process after its return from the function, because it is not the rank."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        report = report_of_exit(error)
        status = int(report["exit"].removeprefix("exit ").replace("ok", "0"))
        sys.stderr.write(report.get("message", ""))
    elif error is not None:
        sys.stderr.write(traceback_of(error, __file__))
    with contextlib.suppress(Exception):
        _flush()
    os._exit(status & 0xFF)


def end(status: int, parent: int) -> NoReturn:
    """End this process as a script would, without finalizing the interpreter.

    With torch loaded, finalization takes 0.3 s and can only crash: exit handlers have already run.

    Args:
        status: exit status.
        parent: pid of the process that started this one.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            step()
    # If the parent was killed during the grace after Ctrl-C, no other process ends the rest of the group.
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(status)


def _flush() -> None:
    _flush_streams()
    ctypes.CDLL(None).fflush(None)  # output of native libraries


def _flush_streams() -> None:
    """Flush the standard streams, even if the function has replaced them."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # the user's stream may have no `flush`, or fail
            if stream is not None:
                stream.flush()


# ----------------------------------------------------------------------------------------------------
# Pickling for processes that multiprocessing spawns from a trainer, such as a DataLoader's. A spawned process imports
# the `__main__` of its parent, here the trainer's module and not the user's script. So objects of the user's `__main__`
# travel by value, in both directions; cloudpickle numbers such classes so that both sides recognize them.


def pickle_main_by_value(dumps: Callable[[object], bytes]) -> None:
    """Make multiprocessing pickle classes and functions of the user's `__main__` by value.

    Args:
        dumps: pickles such an object by value.
    """

    def reduce(_: object, value: object) -> Any:
        if (
            isinstance(value, (type, FunctionType))
            and value.__module__ == "__main__"
            and not _is_importable(value)
        ):
            return pickle.loads, (dumps(value),)
        return NotImplemented

    # Pickle does not look up classes and functions in its dispatch table, so it needs this hook.
    ForkingPickler.reducer_override = reduce  # type: ignore[method-assign]


def _is_importable(value: type | FunctionType) -> bool:
    """Whether `__main__` has the object under its name, as pickle expects."""
    named: object = sys.modules["__main__"]
    for name in value.__qualname__.split("."):
        named = getattr(named, name, None)
    return named is value


# ----------------------------------------------------------------------------------------------------
# Threads of numpy's OpenBLAS in a process that will fork: one before the fork, the variable's number afterwards.

VARIABLE = "OPENBLAS_NUM_THREADS"
# Names of the function in different builds; numpy's wheels have the first name.
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def hold_threads() -> None:
    """Load OpenBLAS without extra threads."""
    os.environ[VARIABLE] = "1"  # noqa: TID251 - OpenBLAS's own variable


def restore_threads() -> None:
    """Set the threads of a loaded OpenBLAS to the variable's number, at most one per processor, as its default is."""
    number = os.environ.get(VARIABLE, "")  # noqa: TID251 - OpenBLAS's own variable
    if not number.isdecimal() or number == "1":
        return
    maps = Path("/proc/self/maps").read_text(errors="replace")
    for path in {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}:
        library = ctypes.CDLL(path)
        setter = next((name for name in _SETTERS if hasattr(library, name)), None)
        if setter is not None:
            getattr(library, setter)(min(int(number), len(os.sched_getaffinity(0))))


if __name__ == "__mp_main__":  # in a process that multiprocessing spawns from a trainer
    pickle_main_by_value(dumps)
if __name__ == "__main__":
    started_by = os.getppid()
    end(main(int(sys.argv[1]), int(sys.argv[2])), started_by)
