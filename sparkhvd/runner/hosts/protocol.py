"""Channel of messages between the launcher and an agent, and the first request."""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass, field

from sparkhvd.wire import Message, pack, take_frame, unpack, write_frame

_READ_BYTES = 1 << 20


class Channel:
    """Channel over two pipes. Any thread may send, but only one thread at a time may receive."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self._writer = writer
        self._came = bytearray()
        self._lock = threading.Lock()

    def send(self, kind: str, data: bytes = b"", **values: object) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: the peer is gone.
        """
        frame = pack(kind, data, values)
        with self._lock:
            write_frame(self._writer, frame)

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Receive a message, or return None if the peer has ended.

        Raises:
            TimeoutError: no bytes arrived for `timeout_s`, even of a partial message, which the next call continues.
        """
        while (frame := take_frame(self._came)) is None:
            if not select.select([self._reader], [], [], timeout_s)[0]:
                raise TimeoutError
            part = os.read(self._reader, _READ_BYTES)
            if not part:
                return None
            self._came += part
        return unpack(frame)

    def read_line(self, mark: bytes, timeout_s: float) -> bytes | None:
        """Read up to the line with the mark and return its rest, or None if the peer has ended.

        Call this before `receive`. Skips other lines, which come from the login shell.

        Raises:
            TimeoutError: it has not arrived in time.
        """
        deadline = time.monotonic() + timeout_s
        line = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reader], [], [], left)[0]:
                raise TimeoutError
            letter = os.read(self._reader, 1)
            if not letter:
                return None
            line += letter
            if letter == b"\n":
                _, found, rest = line.partition(mark)
                if found:
                    return rest.rstrip(b"\n")
                line = b""


# ----------------------------------------------------------------------------------------------------
# Request of the launcher to an agent, before all ranks are known.


@dataclass(frozen=True)
class StartRequest:
    """Ranks of a host. The job, with its key, follows later.

    Attributes:
        first: first rank of the host.
        count: number of its ranks.
        cwd: working directory.
        env: variables of the ranks, in addition to the agent's.
        settings: `JobSettings.to_json()`.
        address: of this host for the others, if known: a loopback address if all hosts are this machine; else "".
        towards: name of another host.
        command: of a script; None for a function, whose pickled call is sent with the request.
        sys_path: of the launcher, for a function.
        use_gpu: of `run_hosts`.
        is_elastic: whether processes are started individually, at the launcher's request.
    """

    first: int
    count: int
    cwd: str
    env: dict[str, str] = field(repr=False)
    settings: str = field(repr=False)
    address: str
    towards: str
    command: list[str] | None = None
    sys_path: list[str] = field(default_factory=list)
    use_gpu: bool | None = None
    is_elastic: bool = False
