"""Ranks that are processes of the user's command, on this host: started, watched, their output passed on.

**Ownership**: each rank leads a session and process group of its own, which ends with it. A `Guard` ends the groups if
the launcher is killed. The listeners are bound here and inherited, so no port is free for another program in between.

**Threads**: the caller's watches; two per rank read its output. Lines of several ranks never mix.

**Failure**: after the first rank that fails the others have `GRACE_S` to end by themselves, as they do once the engine has
told them; then they are terminated, and killed `KILL_S` later. The output of the rank that failed first is shown last.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from sparkhvd import processors
from sparkhvd.launchers.handover import VARIABLE, Handover
from sparkhvd.rendezvous import Endpoint, Job, Listener
from sparkhvd.runner import launching
from sparkhvd.runner.guard import Guard
from sparkhvd.settings import Settings

__all__ = ["Output", "run_script"]

GRACE_S = 4.0
KILL_S = 2.0
_ADDRESS = "127.0.0.1"
_TAIL_LINES = 20
# A longer line is passed on in pieces.
_LINE_BYTES = 1 << 20
_CONSEQUENCE = re.compile(r"sparkhvd\.errors\.(CollectiveError|PeerLostError): ")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Output:
    """Where the ranks' output goes.

    Attributes:
        folder: files `rank.<rank>/stdout` and `stderr` too; None for none.
        timestamps: the local time is put in front of every line.
    """

    folder: Path | None = None
    timestamps: bool = False


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    threads: list[threading.Thread] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    status: int | None = None


def run_script(
    command: Sequence[str], num_proc: int, env: Mapping[str, str], output: Output
) -> int:
    """Run a command on every rank; return the exit status for the shell.

    Args:
        command: program and arguments.
        num_proc: number of ranks.
        env: variables of the ranks, all of them.
        output: where their output goes.

    Returns:
        0 if every rank has ended with 0; else the status of the rank that failed first (not because it missed another
        one), or 128 + the number of the signal that ended it or this process.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(Guard())
        signals = stack.enter_context(_signals())
        port = stack.enter_context(launching.reserved_port(_ADDRESS))
        lock = threading.Lock()
        ranks = []
        try:
            for number, (variables, descriptors) in enumerate(_handed_over(num_proc, env, port)):
                process = _start(command, variables, descriptors)
                guard.add(process.pid)
                ranks.append(_Rank(number, process))
                _read_output(ranks[-1], output, lock)
            return _watch(ranks, guard, signals)
        finally:
            _end(ranks, guard)


def _handed_over(
    num_proc: int, env: Mapping[str, str], port: int
) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Yield every rank's variables and the descriptors that it inherits, which are closed when the next is asked for."""
    settings = Settings.resolve()
    threads = max(1, int(processors.allowed() / num_proc))
    job_id, key = secrets.token_hex(8), secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(Listener.bind(_ADDRESS, settings)) for _ in range(num_proc)
        ]
        endpoints: tuple[Endpoint, ...] = tuple(each.endpoint() for each in listeners)
        for rank, listener in enumerate(listeners):
            job = Job(key, job_id, 0, rank, num_proc, endpoints)
            handover = Handover(
                job.to_json(), listener.endpoint().to_dict(), listener.filenos(), rank, threads
            )
            descriptor = handover.to_descriptor()
            variables = {**_variables(rank, num_proc, port), VARIABLE: str(descriptor)}
            sockets = [fd for fd in listener.filenos() if fd >= 0]
            yield {"OMP_NUM_THREADS": str(threads), **env, **variables}, [descriptor, *sockets]
            os.close(descriptor)
            listener.close()


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what Horovod and torch.distributed call a rank's place."""
    horovod = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    horovod |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    torch = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {
        **{f"HOROVOD_{name}": str(value) for name, value in horovod.items()},
        **{name: str(value) for name, value in torch.items()},
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",  # a rank's lines come when it prints them
    }


def _start(
    command: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _read_output(rank: _Rank, output: Output, lock: threading.Lock) -> None:
    """Start the threads that pass a rank's lines on."""
    folder = None
    if output.folder is not None:
        folder = output.folder / f"rank.{rank.number}"
        folder.mkdir(parents=True, exist_ok=True)
    for name, pipe, target in (
        ("stdout", rank.process.stdout, sys.stdout),
        ("stderr", rank.process.stderr, sys.stderr),
    ):
        assert pipe is not None
        file = None if folder is None else open(folder / name, "wb", buffering=0)  # noqa: SIM115 - the thread's
        arguments = (rank, pipe, target, file, output.timestamps, lock)
        thread = threading.Thread(target=_pass_on, args=arguments, daemon=True)
        thread.start()
        rank.threads.append(thread)


def _pass_on(
    rank: _Rank,
    pipe: IO[bytes],
    target: IO[str],
    file: BinaryIO | None,
    timestamps: bool,
    lock: threading.Lock,
) -> None:
    with pipe, file or contextlib.nullcontext():
        while line := pipe.readline(_LINE_BYTES):
            if file is not None:
                file.write(line)
            text = line.decode(errors="replace").rstrip("\n")
            with lock, contextlib.suppress(OSError, ValueError):  # a reader that has gone
                rank.tail.append(text)
                target.write(launching.line_of(f"[{rank.number}] {text}", timestamp=timestamps))
                target.flush()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a descriptor from which the numbers of the signals to this process are read, a byte each.

    Those that it ignores, as under nohup, stay ignored.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _watch(ranks: Sequence[_Rank], guard: Guard, signals: int) -> int:
    """Wait for all ranks; return the exit status."""
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    running = {}
    for rank in ranks:
        descriptor = os.pidfd_open(rank.process.pid)
        running[descriptor] = rank
        poll.register(descriptor, select.POLLIN)
    failed: list[_Rank] = []
    received = 0
    ending = _Ending(ranks)
    while running:
        for descriptor, _ in poll.poll(ending.next_step_ms()):
            if descriptor == signals:
                numbers = os.read(signals, 64)
                received = received or numbers[0]
                ending.interrupt(numbers[0])
                continue
            rank = running.pop(descriptor)
            poll.unregister(descriptor)
            os.close(descriptor)
            _reap(rank, guard)
            if rank.status != 0:
                failed.append(rank)
                ending.begin()
        ending.step()
    for rank in ranks:
        for thread in rank.threads:
            thread.join(KILL_S)  # what a rank has started and left behind may hold the pipe
    if received:
        return 128 + received
    if not failed:
        return 0
    return _tell(next((rank for rank in failed if not _is_consequence(rank)), failed[0]))


def _is_consequence(rank: _Rank) -> bool:
    """Return True if a rank has ended because another one did: that may take longer to end than to tell."""
    return any(_CONSEQUENCE.match(line) for line in rank.tail)


def _reap(rank: _Rank, guard: Guard) -> None:
    """Take the status of a rank that has ended, and end what it has started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.process.pid, signal.SIGKILL)
    guard.remove(rank.process.pid)
    rank.status = rank.process.wait()


def _tell(rank: _Rank) -> int:
    """Show how the rank that failed first has ended, and its last lines; return the exit status."""
    status = rank.status or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    lines = "".join(f"[{rank.number}] {line}\n" for line in rank.tail)
    sys.stderr.write(f"sparkhvdrun: rank {rank.number} {how} first. Its last lines:\n{lines}")
    sys.stderr.flush()
    return 128 - status if status < 0 else status


class _Ending:
    """The end of all ranks in steps: by themselves, by SIGTERM, by SIGKILL."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks
        self._steps: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        """Give the ranks time to end by themselves."""
        if not self._steps:
            now = time.monotonic()
            self._steps.extend(
                [(now + GRACE_S, signal.SIGTERM), (now + GRACE_S + KILL_S, signal.SIGKILL)]
            )

    def interrupt(self, number: int) -> None:
        """Pass a signal on; a second one kills."""
        if self._steps:
            self._send(signal.SIGKILL)
        else:
            self._send(number)
            self._steps.append((time.monotonic() + GRACE_S, signal.SIGKILL))

    def next_step_ms(self) -> float | None:
        """Return the time until `step` has something to do; None for never."""
        return max(0.0, (self._steps[0][0] - time.monotonic()) * 1000) if self._steps else None

    def step(self) -> None:
        """Do what is due."""
        while self._steps and time.monotonic() >= self._steps[0][0]:
            self._send(self._steps.popleft()[1])
            if not self._steps:
                self._steps.append((time.monotonic() + KILL_S, signal.SIGKILL))

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)


def _end(ranks: Sequence[_Rank], guard: Guard) -> None:
    """Kill ranks that are left because this process fails."""
    for rank in ranks:
        if rank.status is None:
            _reap(rank, guard)
