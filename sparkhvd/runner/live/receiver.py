"""Driver's side of live output: shows the lines of ranks as they arrive.

**Threads**: one background thread accepts, reads and shows. A stream that blocks stops only this thread, and then ranks
leave out lines. **Shutdown**: the end of the block reads what the ranks sent before they ended, within `_DRAIN_S` +
`_JOIN_S`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence

from sparkhvd.rendezvous.event_loop import EventLoop, Task, Wait, read, receive_frame, send, sleep
from sparkhvd.rendezvous.handshake import HELLO, SERVICE_STAGE, answer
from sparkhvd.runner.driver_port import listen, proof_between
from sparkhvd.runner.live.frames import (
    MAX_RECORD_BYTES,
    PURPOSE,
    Record,
    left_out,
    record_of,
    shown,
)
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.spark import SparkShim

# How long the handshake of a connection may take.
_HANDSHAKE_S = 5.0
# How long the rest of a record may take.
_RECORD_S = 30.0
# How long to read the connections of ended ranks to their end.
_DRAIN_S = 0.5
# How long the thread may take to end after that.
_JOIN_S = 2.0
# Longest wait of a selector, in whole days.
_FOREVER_S = 24.0 * 86400
# Unauthenticated connections beyond the number of ranks.
_SPARE_CONNECTIONS = 64


class Receiver:
    """Listener for the lines of an attempt's ranks. A context manager."""

    def __init__(
        self,
        listening: socket.socket,
        host: str,
        display: Display,
        key: str,
        job_id: str,
        attempt: int,
        size: int,
    ) -> None:
        """Prepare a receiver. It runs inside `with`.

        Args:
            listening: non-blocking; closed at the end.
            host: at which ranks reach it.
            display: used only by the thread until the end of the block.
            key: of the attempt, in hex.
            job_id: of the attempt.
            attempt: 0 for the first launch.
            size: number of ranks.
        """
        self.address = (host, int(listening.getsockname()[1]))
        self._listening = listening
        self._display = display
        self._job = proof_between(PURPOSE, key, job_id, attempt, 0, size + 1)
        self._size = size
        self._of_rank: dict[int, socket.socket] = {}
        self._num_open = 0
        self._was_reached = False
        self._loop = EventLoop()
        self._is_ending = self._is_over = False
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="sparkhvd-live", daemon=True)

    @classmethod
    def listen(
        cls,
        shim: SparkShim,
        display: Display,
        key: str,
        job_id: str,
        attempt: int,
        size: int,
    ) -> Receiver:
        """Listen where executors reach the driver. The arguments are those of the class.

        Raises:
            OSError: this process cannot listen there.
        """
        return cls(*listen(shim), display, key, job_id, attempt, size)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        with contextlib.suppress(OSError):  # the thread has ended
            self._wakes.send(b"\0")
        self._thread.join(_DRAIN_S + _JOIN_S)

    @property
    def was_reached(self) -> bool:
        """Whether a rank has connected."""
        return self._was_reached

    @property
    def is_stuck(self) -> bool:
        """Whether the receiver did not end in time, because the stream blocks."""
        return self._thread.is_alive()

    # --- the thread

    def _run(self) -> None:
        try:
            self._loop.start(self._accept())
            self._loop.start(self._end())
            self._loop.run(lambda: self._is_over)
        finally:
            self._loop.close()
            for sock in (self._listening, self._wakes, self._woken):
                sock.close()

    def _end(self) -> Task:
        """Wait for the caller, and then for the connections of ended ranks."""
        while not self._is_ending:
            with contextlib.suppress(TimeoutError):
                yield Wait(self._woken, selectors.EVENT_READ, time.monotonic() + _FOREVER_S)
        until = time.monotonic() + _DRAIN_S
        while self._num_open and time.monotonic() < until:
            yield from sleep(0.01)
        self._is_over = True

    def _accept(self) -> Task:
        while True:
            with contextlib.suppress(TimeoutError):
                yield Wait(self._listening, selectors.EVENT_READ, time.monotonic() + _FOREVER_S)
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:  # the peer has closed already
                continue
            except OSError:  # no descriptor is free
                yield from sleep(1.0)
                continue
            if self._num_open >= 2 * self._size + _SPARE_CONNECTIONS:
                sock.close()
                continue
            self._num_open += 1
            self._loop.start(self._receive(sock))

    def _receive(self, sock: socket.socket) -> Task:
        rank = -1
        try:
            with sock, contextlib.suppress(OSError, ValueError):  # not a rank, or it is gone
                sock.setblocking(False)
                until = time.monotonic() + _HANDSHAKE_S
                hello = yield from read(sock, HELLO.size, until)
                known = yield from answer(self._job, SERVICE_STAGE, hello, sock, until)
                if known is None:
                    return
                rank = known[1] - 1
                self._was_reached = True
                yield from self._records(sock, rank)
        finally:
            self._num_open -= 1
            if self._of_rank.get(rank) is sock:
                del self._of_rank[rank]

    def _records(self, sock: socket.socket, rank: int) -> Generator[Wait, None, None]:
        """Show the records of a rank, and acknowledge them."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if rank in self._of_rank:  # a rank opens another connection only if the old one is dead
            with contextlib.suppress(OSError):
                self._of_rank[rank].shutdown(socket.SHUT_RDWR)
        self._of_rank[rank] = sock
        while True:
            yield Wait(sock, selectors.EVENT_READ, time.monotonic() + _FOREVER_S)
            until = time.monotonic() + _RECORD_S
            payload = yield from receive_frame(sock, until, MAX_RECORD_BYTES)
            self._display.take(rank, record_of(payload))
            send(sock, shown(self._display.last(rank)))


# ----------------------------------------------------------------------------------------------------
# Records of ranks on the driver's stream, each once.


class Display:
    """Shows the records of an attempt's ranks, for one thread at a time."""

    def __init__(
        self,
        show: Callable[[str], None],
        size: int,
        progress: Callable[[str], None] = lambda _: None,
        elsewhere: str = "",
        metrics: Callable[[int, str], None] | None = None,
    ) -> None:
        """Create a display.

        Args:
            show: called with whole lines.
            size: number of ranks.
            progress: called with a line about the training's progress.
            elsewhere: where lost lines can be found; "" for nowhere.
            metrics: called with the rank and each entry of `log_metrics`, as JSON; None shows it as a line.
        """
        self._elsewhere = elsewhere
        self._metrics = metrics
        self._show = show
        self._progress = progress
        # Number of the last shown record, by rank.
        self._shown = [0] * size

    def last(self, rank: int) -> int:
        """Return the number of the last shown record of a rank, or 0 without a record."""
        return self._shown[rank]

    def take(self, rank: int, record: Record) -> None:
        """Show a record, unless it was shown before. Progress has no number."""
        if record.number == 0:
            with contextlib.suppress(Exception):
                self._progress(record.text)
        if record.number <= self._shown[rank]:
            return
        # A broken stream never breaks training; text that it refuses is lost.
        with contextlib.suppress(Exception):
            if not record.is_metrics:
                self._show(record.text)
            elif self._metrics is None:
                self._show(f"[{rank}] metrics {record.text}")
            elif record.text:
                self._metrics(rank, record.text)
        self._shown[rank] = record.number

    def show_rest(self, outcomes: Iterable[Outcome]) -> None:
        """Show what ranks had not sent when they ended, and count lost lines."""
        for outcome in outcomes:
            if outcome.rank is not None:
                self._show_unsent(outcome.rank, [Record(*fields) for fields in outcome.unsent])

    def _show_unsent(self, rank: int, records: Sequence[Record]) -> None:
        lost = [each for each in records if not each.text and each.number > self._shown[rank]]
        if lost:
            text = left_out(rank, sum(each.lines for each in lost), self._elsewhere)
            self.take(rank, Record(lost[-1].number, text))
        for record in records:
            self.take(rank, record)
