"""Parent's side of a trainer process: start it, send its job, relay its output, wait for its end.

**Threads**: three daemon threads per trainer: one relays output lines, one reads the result pipe, one waits for
the process to end. The caller's thread only waits on events, so Ctrl-C reaches it. **Ownership**: the threads own
their pipe's read end and close it; the caller owns the pipe to the trainer. **Shutdown**: when the trainer has
ended, its process group is killed before it is reaped, while the group's number is still reserved.
Then the pipes reach their end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkhvd.errors import InternalError
from sparkhvd.runner import allocator, orphans, zygote_client
from sparkhvd.runner.outcomes import Outcome, OutcomeKind, exit_text
from sparkhvd.runner.output import LineReader, Tail
from sparkhvd.runner.processes import (
    InheritedPipes,
    Process,
    ProcessExit,
    ProcessGroup,
    fresh_trainer,
)
from sparkhvd.runner.protocol import JobFrame, Prologue, read_report
from sparkhvd.terminal import visible
from sparkhvd.wire import read_frame, read_json, write_frame

LOG_TAIL_LINES = 100
# Longer lines are passed on in pieces.
_LINE_BYTES = 16 << 10
# How long a trainer may outlive its report: threads and exit handlers of the user's code.
EXIT_GRACE_S = 30.0
# How long a function may run after KeyboardInterrupt, for example to save.
INTERRUPT_GRACE_S = 5.0
# How long a message waits for earlier lines whose stream blocks.
_BLOCKED_S = 1.0
# How long to read a trainer's pipes after its end. Processes outside its group may still hold them.
_DRAIN_S = 5.0
# How long CUDA's driver may take to count the GPUs: without nvidia-persistenced it initializes each of them.
GPU_ANSWER_S = 120.0


def inherited(name: str) -> str | None:
    """Read an inherited variable of a trainer, or None if it is not set."""
    return os.environ.get(name)  # noqa: TID251 - not a setting: the trainer inherits it


class Trainer:
    """Trainer process. The context manager kills the remaining processes of its group at exit."""

    def __init__(
        self,
        rank: int,
        prologue: Prologue,
        program: bytes,
        log: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
        mark: str = "",
        notify: Callable[[str], object] | None = None,
        metrics: Callable[[str], object] | None = None,
        progress: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Start the process and send it everything but the job. A zygote forks it only when it gets its job.

        Args:
            rank: its rank, for the prefix of its output lines.
            prologue: its environment; it inherits the listener's descriptors.
            program: `dump_program(...)`.
            log: called with each line of its output from a thread of this trainer.
            on_end: called once when it has ended, from a thread of this trainer.
            mark: in its variables, for `orphans`; "" for no mark.
            notify: called with the text of each `log_to_driver`, with prefixed lines like `log`, from a thread; None
                uses `log`.
            metrics: called with each entry of `log_metrics`, as JSON, from the same thread; None passes it to `notify` as a line.
            progress: called with each line about the training's progress, from the same thread.
        """
        self.rank, self.pid = rank, 0
        self.result = b""
        self._num_threads = prologue.num_threads
        self._log, self._notify = log, notify or log
        self._metrics, self._progress = metrics or self._notify_of_metrics, progress
        self._tail = Tail(LOG_TAIL_LINES)
        self._report: dict[str, Any] | None = None
        self._status: int | None = 0
        self._rss = 0
        self._has_job = False
        self._reported = threading.Event()
        self._asks_gpus = bool(prologue.gpu_views)
        self._gpus: list[dict[str, Any]] | None = None
        self._has_gpus = threading.Event()
        self._ended = threading.Event()
        self._holder: subprocess.Popen[bytes] | None = None
        self._grace_until: float | None = None
        self._is_forced = False
        self._on_end = on_end
        self._mark = mark
        self._group: ProcessGroup | None = None
        # Guards the delayed start, and whether it may still happen.
        self._start_lock = threading.Lock()
        self._is_given_up = False
        self._late: TrainerStart | None = None
        self._spec, start = prepare(prologue, program)
        if may_fork(prologue):
            self._late = start.kept()
            prepare_zygote(prologue)
        else:
            self._begin(start)

    def _start_late(self) -> None:
        """Start a delayed trainer with its job: the zygote has had time to import."""
        with self._start_lock:
            start, self._late = self._late, None
        if start is not None:
            try:
                self._begin(start)
            finally:
                start.close_listener()

    def _begin(self, start: TrainerStart) -> None:
        frames = [start.prologue.to_bytes(), start.program]
        environ = orphans.marked(start.environ, self._mark)  # the zygote has no mark
        try:
            process: Process | None = None
            if start.is_late:
                process = zygote_client.fork(
                    start.prologue.preload,
                    start.variables(),
                    start.ends,
                    start.prologue.zygote_idle_s,
                )
            if process is None:
                process = fresh_trainer(environ, start.ends)
            else:
                frames.insert(0, json.dumps(environ).encode())
        except BaseException:
            os.close(start.result)
            os.close(start.log)
            if not start.is_late:  # else the end of the block closes it
                os.close(self._spec)
            raise
        finally:
            start.ends.close()
        self.pid = process.pid
        self._group = ProcessGroup(process, self._mark, f"sparkhvd-wait-{self.rank}", _DRAIN_S)
        if self._is_given_up:
            self._group.signal(signal.SIGKILL)
        reader = LineReader(start.log, _LINE_BYTES, self._pass_line)
        readers = [
            self._thread("log", self._relay, start.log, reader),
            self._thread("result", self._receive, start.result, reader),
        ]
        self._group.watch(readers, self._end)
        with contextlib.suppress(BrokenPipeError):  # it died at once; its outcome has the reason
            for frame in frames:
                write_frame(self._spec, frame)

    def _thread(self, name: str, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(
            target=target, args=args, name=f"sparkhvd-{name}-{self.rank}", daemon=True
        )
        thread.start()
        return thread

    # --- the caller's side

    def send(self, job: JobFrame) -> None:
        """Send the trainer its job. It starts the function."""
        self._start_late()
        self._has_job = True
        with contextlib.suppress(BrokenPipeError):  # it is gone; its outcome has the reason
            write_frame(self._spec, job.to_bytes())

    def gpus(
        self, timeout_s: float = GPU_ANSWER_S, *, view: int = 0
    ) -> tuple[tuple[str, ...], str]:
        """Wait for the UUIDs of the process's visible GPUs in a view.

        The second result says why they are unknown, or is "".
        """
        if not self._asks_gpus:
            return (), ""
        if not self._has_gpus.wait(timeout_s):
            return (), f"CUDA's driver did not answer in {timeout_s:g} s"
        if self._gpus is None:
            return (), "the process ended before it had asked CUDA's driver"
        answer = self._gpus[view]
        return tuple(answer["uuids"]), str(answer["error"])

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process has ended and its output is read, and return True if it has."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended.is_set():
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if left <= 0:
                return False
            # The event ends the wait at once; the limit lets `enforce_grace` run every second.
            self._ended.wait(left)
            self.enforce_grace()
        return True

    def enforce_grace(self) -> None:
        """Kill a trainer still running 30 s after its report.

        Threads and exit handlers have that time.
        """
        if not self._reported.is_set() or self._ended.is_set():
            return
        now = time.monotonic()
        if self._grace_until is None:
            self._grace_until = now + EXIT_GRACE_S
        elif now >= self._grace_until and not self._is_forced:
            self._is_forced = True
            self.give_up(f"{EXIT_GRACE_S:.0f} s after its function")

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function, or kill a trainer without a job yet.

        Returns at once.
        """
        if self._ended.is_set() or self._reported.is_set():
            return
        if self._group is not None and self._has_job:
            self._hold_pipe()
            self._group.signal(signal.SIGINT, whole=False)
        else:
            self.kill()

    def _hold_pipe(self) -> None:
        """Keep the trainer's time to save even if this process is killed, as by an ending JVM.

        The end of its pipe kills the trainer, so another process holds the other side open.
        """
        if self._holder is None:
            with contextlib.suppress(OSError):
                self._holder = subprocess.Popen(
                    ["sleep", f"{INTERRUPT_GRACE_S:g}"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[self._spec],
                    start_new_session=True,
                )

    def give_up(self, when: str) -> None:
        """Kill the trainer and log it in its output."""
        self._log(f"[{self.rank}] (did not end {when}; killed)")
        self.kill()

    def kill(self) -> None:
        """Kill the trainer and every process of its group. Return at once."""
        with self._start_lock:
            self._is_given_up = True
            late, self._late = self._late, None
        if late is not None:
            late.abandon()
            self._end(ProcessExit(-signal.SIGKILL))
            return
        if self._group is not None:
            self._group.signal(signal.SIGKILL)

    def outcome(self, *, host: str = "", attempt: int = 0) -> Outcome:
        """Make the outcome of the rank. Call this only after `wait` has returned True."""
        if not self._ended.is_set():
            raise InternalError(f"the outcome of rank {self.rank} was read before its end.")
        base: dict[str, Any] = {
            "rank": self.rank,
            "host": host,
            "attempt": attempt,
            "pid": self.pid,
            "num_threads": self._num_threads,
            "log_tail": self._tail.lines(),
            "peak_rss_bytes": self._rss,
        }
        report = self._report
        is_complete = report is not None and report.get("kind") and self._reported.is_set()
        if (
            report is not None
            and is_complete
            and (report["kind"] != OutcomeKind.OK or not self._status or self._is_forced)
        ):
            return Outcome(**{**base, **report})
        started = {k: v for k, v in (report or {}).items() if k in ("started_at", "run_s")}
        message = "after its function had returned" if is_complete else ""
        return Outcome(
            **base, **started, kind=OutcomeKind.CRASH, exit=exit_text(self._status), message=message
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended.is_set():
            self.kill()
        if self._group is not None:
            self._group.join()
        os.close(self._spec)
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()

    # --- the threads

    def _relay(self, fd: int, reader: LineReader) -> None:
        with contextlib.closing(_Closing(fd)):
            reader.run()

    def _pass_line(self, line: bytes) -> None:
        text = self._tail.add(line)
        # A broken log never breaks training. Continue to read: a full pipe would block the trainer.
        with contextlib.suppress(Exception):
            self._log(f"[{self.rank}] {text}")

    def _pass_message(self, reader: LineReader, message: bytes) -> None:
        reader.catch_up(_BLOCKED_S)  # keep the order with lines printed before
        lines = message.decode(errors="replace").split("\n")
        with contextlib.suppress(Exception):  # as above
            self._notify("\n".join(f"[{self.rank}] {visible(line)}" for line in lines))

    def _pass_metrics(self, entry: bytes) -> None:
        with contextlib.suppress(Exception):  # as above
            self._metrics(entry.decode(errors="replace"))

    def _notify_of_metrics(self, entry: str) -> None:
        self._notify(f"[{self.rank}] metrics {entry}")

    def _pass_progress(self, text: bytes) -> None:
        with contextlib.suppress(Exception):  # as above
            self._progress(text.decode(errors="replace"))

    def _receive(self, fd: int, reader: LineReader) -> None:
        with contextlib.closing(_Closing(fd)):
            if self._asks_gpus:
                answer = read_frame(fd)
                self._gpus = None if answer is None else read_json(answer)
                self._has_gpus.set()
            started = read_frame(fd)
            if started is None:
                return
            self._report = read_json(started)
            report = read_report(
                fd, partial(self._pass_message, reader), self._pass_metrics, self._pass_progress
            )
            result = None if report is None else read_frame(fd)
            if report is None or result is None:
                return
            self.result = result
            self._report = read_json(report)
            zygote_client.of_this_process.remember(self._report.pop("modules", ()))
            self._reported.set()

    def _end(self, ended: ProcessExit) -> None:
        self._status, self._rss = ended.status, ended.peak_rss_bytes
        self._ended.set()
        self._on_end()


def interrupt(trainers: Sequence[Trainer]) -> None:
    """Raise KeyboardInterrupt in the functions and wait at most INTERRUPT_GRACE_S for their end."""
    for trainer in trainers:
        trainer.interrupt()
    deadline = time.monotonic() + INTERRUPT_GRACE_S
    for trainer in trainers:
        if not trainer.wait(max(0.0, deadline - time.monotonic())):
            trainer.give_up(f"{INTERRUPT_GRACE_S:.0f} s after it was interrupted")


class _Closing:
    """Descriptor with a `close` method."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


# ----------------------------------------------------------------------------------------------------
# Start of a trainer: pipes, environment, and the choice between a fork and a fresh process.

_STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# Folders of Python's own modules.
_OF_PYTHON = frozenset([*_STDLIB, *(f"{folder}/lib-dynload" for folder in _STDLIB)])


@dataclass(frozen=True)
class TrainerStart:
    """Everything needed to start a trainer.

    Attributes:
        prologue: its first frame.
        program: its second frame.
        environ: environment of the process.
        ends: descriptors that the process takes over.
        result: this side's end of the result pipe.
        log: this side's end of the output pipe.
        is_late: whether the start is delayed, for a zygote, beyond the close of the listener by its owner.
    """

    prologue: Prologue
    program: bytes
    environ: dict[str, str]
    ends: InheritedPipes
    result: int
    log: int
    is_late: bool = False

    def kept(self) -> TrainerStart:
        """Make a delayed start with its own copy of the listener."""
        listener = [fd if fd < 0 else os.dup(fd) for fd in self.ends.listener]
        tcp, unix = listener
        ends = replace(self.ends, listener=(tcp, unix))
        return replace(
            self, prologue=replace(self.prologue, listener=(tcp, unix)), ends=ends, is_late=True
        )

    def variables(self) -> dict[str, str]:
        """Make the environment for the imports of the process."""
        return {**self.environ, **self.prologue.variables()}

    def close_listener(self) -> None:
        """Close the listener of a delayed start."""
        for fd in self.ends.listener:
            if fd >= 0:
                os.close(fd)

    def abandon(self) -> None:
        """Close all descriptors of an unneeded delayed start."""
        self.ends.close()
        self.close_listener()
        os.close(self.result)
        os.close(self.log)


def prepare(prologue: Prologue, program: bytes) -> tuple[int, TrainerStart]:
    """Create the pipes and the environment of a process, and return the pipe to it, and the start."""
    spec_read, spec = os.pipe()
    result, result_write = os.pipe()
    log, log_write = os.pipe()
    ends = InheritedPipes(spec_read, result_write, log_write, prologue.listener)
    return spec, TrainerStart(prologue, program, _environment(prologue), ends, result, log)


def prepare_zygote(prologue: Prologue) -> None:
    """Preload modules for a trainer of this prologue in this process's zygote, without waiting."""
    environ = {**_environment(prologue), **prologue.variables()}
    zygote_client.prepare(prologue.preload, environ, prologue.zygote_idle_s)


def may_fork(prologue: Prologue) -> bool:
    """Whether a zygote may fork the process: not if it queries CUDA's driver, or this host has a GPU."""
    return bool(prologue.zygote_idle_s) and not prologue.gpu_views and zygote_client.is_possible()


# Idle threads of OpenMP spin for milliseconds, on cores that other ranks, other fits and the JVM need. Two fits at once
# on two cores took 32 s with libgomp's default, 13 s with this number and 12 s without spins; one fit 14, 14 and 17 s.
_OPENMP_SPINS = "3000"


def _environment(prologue: Prologue) -> dict[str, str]:
    """Make the environment for the start of the process."""
    inherited = os.environ  # noqa: TID251 - the trainer inherits the environment of its parent
    environ = {**inherited, **_loader_variables(prologue.env)}
    if prologue.keep_freed_memory:
        environ.update(allocator.start_variables(environ))
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*environ, *prologue.env}:
        environ["GOMP_SPINCOUNT"] = _OPENMP_SPINS
    # The package must be found before the trainer sets its own path; "" is the working directory.
    path = [entry or prologue.cwd for entry in prologue.sys_path]
    # A notebook has the working directory first, but has already imported Python's modules: a `secrets.py` there would
    # hide Python's.
    path.sort(key=lambda entry: entry not in _OF_PYTHON)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path)) or environ.get("PYTHONPATH", "")
    return environ


def _loader_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Select the variables to set before the process starts."""
    prefixes = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")
    return {name: value for name, value in env.items() if name.startswith(prefixes)}
