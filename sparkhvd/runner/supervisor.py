"""Wait for the ranks of a command, here or on other hosts, and shut them down together.

**Failure**: after the first failed rank the others have `GRACE_S` to end by themselves, as they do once the engine has
notified them. Then they are terminated, and killed `KILL_S` later. The output of the rank that failed first is shown
last.
"""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner import launching
from sparkhvd.runner.output import Tail

# How long the other ranks may take to end by themselves, after a rank has failed.
GRACE_S = 2.5
# Time between SIGTERM and SIGKILL.
KILL_S = 0.5
# Time to save after a forwarded signal.
SIGNAL_S = 3.0
# Exit status for a lost host; ssh uses it for its own failures, too.
_STATUS_LOST = 255
_CONSEQUENCE = re.compile(
    r"sparkhvd\.errors\.(CollectiveError|PeerLostError|ElasticError|LeftOutError): "
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RankEnded:
    """End of a rank.

    Attributes:
        rank: the rank, or the number of a member of an elastic job.
        status: exit status, negative for a signal.
        how: description, if more precise than the status.
        is_final: whether a replacement would fail likewise.
    """

    rank: int
    status: int
    how: str = ""
    is_final: bool = False


@dataclass(frozen=True)
class SignalReceived:
    """Signal to this process."""

    number: int


@dataclass(frozen=True)
class HostLost:
    """Lost connection to a host, with all of its running ranks."""

    host: str
    ranks: tuple[int, ...]
    why: str


Event = RankEnded | SignalReceived | HostLost
Events = queue.SimpleQueue[Event]
F = TypeVar("F", bound=RankEnded | HostLost)


@contextlib.contextmanager
def signals(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Turn signals to this process into events inside the block.

    Ignored signals, as under nohup, stay ignored.
    """

    def put(number: int, _: object) -> None:
        events.put(SignalReceived(number))

    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, put) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(events: Events, size: int, send: Callable[[int], None], screen: Screen) -> int:
    """Wait for all ranks.

    Args:
        events: ends of ranks, losses of hosts, and signals.
        size: number of ranks.
        send: sends a signal to all running ranks.
        screen: has their last lines.

    Returns:
        0 if every rank exited with 0; else the status of the rank that failed first on its own account, or 128 + the number of the signal that ended it or this process.
    """
    running = set(range(size))
    failed: list[RankEnded | HostLost] = []
    received = 0
    ending = ShutdownSequence(send)
    while running:
        event: Event | None = None
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=ending.next_step_s())
        if isinstance(event, SignalReceived):
            received = received or event.number
            ending.interrupt(event.number)
        elif isinstance(event, RankEnded):
            running.discard(event.rank)
            if event.status != 0:
                failed.append(event)
                ending.begin()
        elif isinstance(event, HostLost):
            running.difference_update(event.ranks)
            failed.append(event)
            ending.hurry()
        ending.step()
    if received:
        return 128 + received
    if not failed:
        return 0
    cause = first_cause(failed, screen)
    return _report_loss(cause) if isinstance(cause, HostLost) else notify(cause, screen)


def first_cause(failed: Sequence[F], screen: Screen) -> F:
    """Find the first failure not caused by another, or else the first failure."""
    return next((one for one in failed if not _is_consequence(one, screen)), failed[0])


def _is_consequence(failure: RankEnded | HostLost, screen: Screen) -> bool:
    """Whether the rank failed because another rank did."""
    return isinstance(failure, RankEnded) and any(
        _CONSEQUENCE.match(line) for line in screen.tail(failure.rank)
    )


def ended_how(status: int) -> str:
    """Describe the end of a process, as in "was ended by SIGKILL"."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"


def notify(ended: RankEnded, screen: Screen) -> int:
    """Print how the first failed rank ended, and its last lines, and return the exit status."""
    status, rank = ended.status, ended.rank
    lines = "".join(f"[{rank}] {line}\n" for line in screen.tail(rank))
    sys.stderr.write(
        f"sparkhvdrun: rank {rank} {ended_how(status)} first. Its last lines:\n{lines}"
    )
    sys.stderr.flush()
    return 128 - status if status < 0 else status


def _report_loss(lost: HostLost) -> int:
    ranks = ", ".join(map(str, lost.ranks))
    sys.stderr.write(
        f"sparkhvdrun: the connection to {lost.host} (ranks {ranks}) was lost: {lost.why}\n"
    )
    sys.stderr.flush()
    return _STATUS_LOST


class ShutdownSequence:
    """Shutdown of all ranks in steps: by themselves, by SIGTERM, by SIGKILL.

    Args:
        send: sends a signal to all running ranks.
        save_s: time to save after an interrupt.
    """

    def __init__(self, send: Callable[[int], None], save_s: float = SIGNAL_S) -> None:
        self._send = send
        self._save_s = save_s
        self._steps: deque[tuple[float, int]] = deque()

    def begin(self) -> None:
        """Let the ranks end by themselves, then terminate them."""
        if not self._steps:
            now = time.monotonic()
            self._steps.extend(
                [(now + GRACE_S, signal.SIGTERM), (now + GRACE_S + KILL_S, signal.SIGKILL)]
            )

    def hurry(self) -> None:
        """Terminate the ranks now, because other ranks have been killed."""
        now = time.monotonic()
        self._steps.clear()
        self._steps.extend([(now, signal.SIGTERM), (now + KILL_S, signal.SIGKILL)])

    def interrupt(self, number: int) -> None:
        """Forward a signal. A second signal kills the ranks."""
        if self._steps:
            self._send(signal.SIGKILL)
        else:
            self._send(number)
            self._steps.append((time.monotonic() + self._save_s, signal.SIGKILL))

    @property
    def has_begun(self) -> bool:
        """Whether the shutdown has started."""
        return bool(self._steps)

    def next_step_at(self) -> float | None:
        """Get the time of the next step, or None if no step is left."""
        return self._steps[0][0] if self._steps else None

    def next_step_s(self) -> float | None:
        """Get the seconds until the next step, or None if no step is left."""
        at = self.next_step_at()
        return None if at is None else max(0.0, at - time.monotonic())

    def step(self) -> None:
        """Send the due signals. The last signal, SIGKILL, is repeated."""
        while self._steps and time.monotonic() >= self._steps[0][0]:
            self._send(self._steps.popleft()[1])
            if not self._steps:
                self._steps.append((time.monotonic() + KILL_S, signal.SIGKILL))


# ----------------------------------------------------------------------------------------------------
# Lines of ranks on this process's streams and in files, with a tail per rank.

_TAIL_LINES = 20


@dataclass(frozen=True)
class Output:
    """Destination of the ranks' output.

    Attributes:
        folder: also write files `rank.<rank>/stdout` and `stderr` there; None for no files.
        timestamps: prefix every line with the local time.
    """

    folder: Path | None = None
    timestamps: bool = False


class Screen:
    """Display of ranks' whole lines with rank prefixes, for any thread. A context manager."""

    def __init__(self, output: Output, size: int) -> None:
        self._folder = output.folder
        self._timestamps = output.timestamps
        self._lock = threading.Lock()
        self._tails: dict[int, Tail] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        try:
            for rank in range(size):
                self.add(rank)
        except BaseException:
            self.__exit__()
            raise

    def add(self, rank: int) -> None:
        """Add a rank.

        Raises:
            InvalidArgumentError: its files cannot be written.
        """
        self._tails[rank] = Tail(_TAIL_LINES)
        if self._folder is None:
            return
        folder = self._folder / f"rank.{rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stream in ("stdout", "stderr"):
                self._files[rank, stream] = open(folder / stream, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise InvalidArgumentError(
                f"--output-filename {str(self._folder)!r} cannot be written: {error}. Give a folder that may be made there."
            ) from error

    def show(self, rank: int, stream: str, line: bytes) -> None:
        """Show a line of a rank."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        with self._lock:
            if file := self._files.get((rank, stream)):
                file.write(line)
            text = self._tails[rank].add(line)
            with contextlib.suppress(OSError, ValueError):  # the reader is gone
                launching.write_to(
                    target, launching.line_of(f"[{rank}] {text}", timestamp=self._timestamps)
                )

    def tail(self, rank: int) -> tuple[str, ...]:
        with self._lock:
            return self._tails[rank].lines()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
