"""Task's end of live output: sends the lines of a rank to the driver, without ever making the rank wait.

**Threads**: a daemon thread from the first line on, the only one that touches the connection but for its abort. **Failure**: a connection
that is refused, cut or silent is replaced by another one, for as long as the rank runs; nothing is told to the rank.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from sparkhvd.rendezvous import Job
from sparkhvd.rendezvous.handshake import introduce
from sparkhvd.rendezvous.loop import Loop, Wait
from sparkhvd.runner.live.backlog import Backlog
from sparkhvd.runner.live.frames import ACK, FIRST, Record, pack, pair

__all__ = ["FLUSH_S", "Sender", "Way"]

# How long the end of a rank may take longer, so that the driver shows its last lines.
FLUSH_S = 2.0
_ABORT_S = 0.2
# How long a connection and its proof may take.
_CONNECT_S = 5.0
# How long the driver may take to acknowledge: then the connection is taken for dead.
_SILENT_S = 10.0
# Pauses between attempts to connect grow from the first to the second.
_PAUSES_S = 0.1, 2.0
# How long lines come together before they are sent.
_GATHER_S = 0.2


@dataclass(frozen=True)
class Way:
    """Way of an attempt's output to the driver; crosses as JSON.

    Attributes:
        address: host and port of the driver.
        shows_lines: whether ordinary lines go there, or messages only.
        on_terminal: whether the task's stderr is the driver's, so that nothing must go both ways.
        is_shown: whether lines that are left out may be on that stderr.
    """

    address: tuple[str, int]
    shows_lines: bool = True
    on_terminal: bool = False
    is_shown: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, from which `from_dict` rebuilds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Way:
        """Rebuild it from `to_dict`, as JSON has it."""
        host, port = fields["address"]
        return cls(**{**fields, "address": (host, port)})

    @property
    def elsewhere(self) -> str:
        """Where lines are that were left out; "" for nowhere."""
        if not self.on_terminal:
            return "the executor's log has all"
        return "they are on stderr" if self.is_shown else ""


class Sender:
    """Sender of one rank's lines; a context manager that leaves no connection open."""

    def __init__(self, way: Way, key: str, job_id: str, attempt: int, size: int, rank: int) -> None:
        """Prepare a sender; it connects when there is a line.

        Args:
            way: to the driver.
            key: of the attempt, in hex.
            job_id: of the attempt.
            attempt: 0 for the first launch.
            size: number of ranks.
            rank: whose lines they are.
        """
        self._address = way.address
        self._job: Job = pair(key, job_id, attempt, size, rank)
        self._backlog = Backlog(
            rank, way.elsewhere, shows_lines=way.shows_lines, is_limited=not way.on_terminal
        )
        self._is_over = threading.Event()
        # Guards the start and the abort.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sock: socket.socket | None = None

    def line(self, line: str) -> bool:
        """Send a line, which begins with its rank; return False if it is left out. Never waits."""
        return self._started(self._backlog.line(line))

    def message(self, text: str) -> bool:
        """Send a message of one or more such lines, which counts apart from them; return False if it is left out."""
        return self._started(self._backlog.message(text))

    def _started(self, is_taken: bool) -> bool:
        if is_taken and self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_over.is_set():
                    self._thread = threading.Thread(
                        target=self._run, name="sparkhvd-live", daemon=True
                    )
                    self._thread.start()
        return is_taken

    def close(self) -> list[Record]:
        """End within `FLUSH_S`; return the last records that the driver may not have shown."""
        self._backlog.end()
        if self._thread is not None:
            self._thread.join(FLUSH_S - _ABORT_S)
        with self._lock:
            self._is_over.set()
            if self._sock is not None:
                with contextlib.suppress(OSError):  # not connected yet, or not any more
                    self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_ABORT_S)
        return self._backlog.rest()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_over.is_set():
            self.close()

    # --- the thread

    def _run(self) -> None:
        pause, longest = _PAUSES_S
        while not self._is_over.is_set() and self._backlog.take(0.0):
            with contextlib.suppress(OSError), self._connected() as sock:
                if self._is_proved(sock):
                    pause = _PAUSES_S[0]
                    self._serve(sock)
                    continue
            self._is_over.wait(pause)
            pause = min(longest, 2 * pause)

    @contextlib.contextmanager
    def _connected(self) -> Generator[socket.socket, None, None]:
        found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as sock:
            with self._lock:
                if self._is_over.is_set():
                    raise OSError("over")
                self._sock = sock
            try:
                sock.settimeout(_CONNECT_S)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.connect(place)
                yield sock
            finally:
                with self._lock:
                    self._sock = None

    def _is_proved(self, sock: socket.socket) -> bool:
        is_proved = False

        def prove() -> Generator[Wait, None, None]:
            nonlocal is_proved
            is_proved = yield from introduce(
                self._job, 0, FIRST, sock, time.monotonic() + _CONNECT_S
            )

        loop = Loop()
        try:
            loop.start(prove())
            loop.run(loop.is_idle)
        finally:
            loop.close()
        return is_proved

    def _serve(self, sock: socket.socket) -> None:
        """Send records until it has ended and all are acknowledged; OSError when the connection is of no use any more."""
        sock.settimeout(_SILENT_S)
        while records := self._backlog.take(_GATHER_S):
            sock.sendall(pack(records))
            while (number := _acknowledged(sock)) < records[-1].number:
                self._backlog.acknowledge(number)
            self._backlog.acknowledge(number)


def _acknowledged(sock: socket.socket) -> int:
    data = b""
    while len(data) < ACK.size:
        part = sock.recv(ACK.size - len(data))
        if not part:
            raise ConnectionResetError("closed by the driver")
        data += part
    return int(ACK.unpack(data)[0])
