"""Driver's end of live output: shows the lines of ranks as they come.

**Threads**: one background thread accepts, reads and shows; a stream that blocks keeps only this thread, and then ranks leave lines out.
**Shutdown**: `close` reads what the ranks have sent before they ended, and takes `_DRAIN_S` + `_JOIN_S` at most.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence

from sparkhvd.rendezvous.event_loop import EventLoop, Task, Wait, read, send, sleep
from sparkhvd.rendezvous.handshake import HELLO, answer
from sparkhvd.runner.driver_port import FIRST, listen, proof_between
from sparkhvd.runner.live.frames import ACK, HEADER, MAX_RECORD_BYTES, PURPOSE, Record, left_out
from sparkhvd.runner.outcomes import Outcome
from sparkhvd.spark import SparkShim

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
    ) -> None:
        """Make a display.

        Args:
            show: called with whole lines.
            size: number of ranks.
            progress: called with a line on the progress of the training.
            elsewhere: where lines are that are lost; "" for nowhere.
        """
        self._elsewhere = elsewhere
        self._show = show
        self._progress = progress
        # Number of the last record that is shown, by rank.
        self._shown = [0] * size

    def last(self, rank: int) -> int:
        """Return the number of the last record of a rank that is shown; 0 for none."""
        return self._shown[rank]

    def take(self, rank: int, record: Record) -> None:
        """Show a record, unless it was shown before; progress has no number."""
        if record.number == 0:
            with contextlib.suppress(Exception):
                self._progress(record.text)
        if record.number <= self._shown[rank]:
            return
        # A broken stream never breaks training; what it does not take is gone.
        with contextlib.suppress(Exception):
            self._show(record.text)
        self._shown[rank] = record.number

    def show_rest(self, outcomes: Iterable[Outcome]) -> None:
        """Show what ranks had not sent when they ended, and count what is lost."""
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


# How long a connection may take to prove that it is a rank's, and a record to come whole.
_HANDSHAKE_S = 5.0
_RECORD_S = 30.0
# How long connections of ranks that have ended may take to be read to their end.
_DRAIN_S = 0.5
_JOIN_S = 2.0
# The longest that a selector waits, in whole days.
_FOREVER_S = 24.0 * 86400
# Connections beyond the ranks' that may try to prove themselves at once.
_SPARE_CONNECTIONS = 64


class Receiver:
    """Listener for the lines of an attempt's ranks; a context manager."""

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
        """Prepare a receiver; nothing runs before `with`.

        Args:
            listening: not blocking; closed at the end.
            host: at which ranks reach it.
            display: used by the thread alone until the end of the block.
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
        """Listen at the address at which executors reach the driver; the arguments are those of the class.

        Raises:
            OSError: this process cannot listen there.
        """
        return cls(*listen(shim), display, key, job_id, attempt, size)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        with contextlib.suppress(OSError):  # the thread is at its end
            self._wakes.send(b"\0")
        self._thread.join(_DRAIN_S + _JOIN_S)

    @property
    def was_reached(self) -> bool:
        """Whether a rank has connected."""
        return self._was_reached

    @property
    def is_stuck(self) -> bool:
        """Whether it did not end in time, because the stream blocks."""
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
        """Wait for the caller, and then for the connections of ranks that have ended."""
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
            except BlockingIOError:  # it is gone again
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
            with sock, contextlib.suppress(OSError):  # not a rank, or one that is gone
                sock.setblocking(False)
                until = time.monotonic() + _HANDSHAKE_S
                hello = yield from read(sock, HELLO.size, until)
                known = yield from answer(self._job, FIRST, hello, sock, until)
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
        if rank in self._of_rank:  # that one is dead, or the rank would not have another
            with contextlib.suppress(OSError):
                self._of_rank[rank].shutdown(socket.SHUT_RDWR)
        self._of_rank[rank] = sock
        while True:
            header = yield from read(sock, HEADER.size, time.monotonic() + _FOREVER_S)
            number, num_bytes = HEADER.unpack(header)
            if num_bytes > MAX_RECORD_BYTES:
                return
            text = yield from read(sock, num_bytes, time.monotonic() + _RECORD_S)
            self._display.take(rank, Record(number, text.decode(errors="replace")))
            send(sock, ACK.pack(self._display.last(rank)))
