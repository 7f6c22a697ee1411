"""A thread that serves connections, and does what other threads hand over to it."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable

from sparkhvd.rendezvous.loop import Loop, Task, Wait, sleep

__all__ = ["Service"]

_READ_BYTES = 1 << 16
_IDLE_S = 3600.0
# Longest wait for the end of the thread, whose steps never wait.
_END_S = 10.0


class Service:
    """Thread with a loop.

    Args:
        name: of the thread.
        after: called in the thread behind what was handed over.

    Attributes:
        loop: of the thread; tasks are started there before `start`, or by the thread.
    """

    def __init__(self, name: str, after: Callable[[], None] = lambda: None) -> None:
        self.loop = Loop()
        self._after = after
        self._at_end: Callable[[], None] = lambda: None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._is_closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, at_end: Callable[[], None]) -> None:
        """Start the thread; `at_end` is called in it, whatever ends it."""
        self._at_end = at_end
        self._thread.start()

    def call(self, step: Callable[[], None]) -> None:
        """Hand a function over to the thread, which calls it; returns at once."""
        self._calls.put(step)
        with contextlib.suppress(OSError):  # full: it rings already; closed: it has ended
            self._ringer.send(b"\0", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the thread; in a fork, which has none, close what it would have closed."""
        if self._thread.is_alive() and os.getpid() == self._pid:

            def stop() -> None:
                self._is_closing = True

            self.call(stop)
            self._thread.join(_END_S)
            if self._thread.is_alive():  # it is a daemon, and still has its sockets
                return
        for sock in (self._bell, self._ringer):
            sock.close()

    def _run(self) -> None:
        for task in (self._hear(), self._live()):
            self.loop.start(task)
        try:
            self.loop.run(lambda: self._is_closing)
        finally:
            self.loop.close()
            self._at_end()

    def _hear(self) -> Task:
        """Do what other threads have asked for."""
        while True:
            yield Wait(self._bell, selectors.EVENT_READ, float("inf"))
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(_READ_BYTES)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
            self._after()

    def _live(self) -> Task:
        """Keep the loop from waiting for ever, which a selector cannot."""
        while True:
            yield from sleep(_IDLE_S)
