"""Forward Ctrl-C from the driver to the ranks of a barrier stage.

Spark does not notify a task when its job is cancelled: it kills the task's Python worker 2 to 4 s later. So every task
keeps a silent connection to a port of the driver. Only when the driver is interrupted does it accept the
connections and answer their hellos. That answer, which needs the attempt's key, is the interrupt. The task reports the
end of its trainer, and waits until all have ended: the first task that ends would make Spark kill the others.

**Best effort**: if executors cannot reach the driver, or a task is killed first, Spark's own cancellation remains.
**Threads**: one daemon thread per task, none on the driver. **Shutdown**: if the driver closes a connection during
an interrupt, there is no time left to save.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Generator

from sparkhvd.rendezvous import Job
from sparkhvd.rendezvous.event_loop import EventLoop, Task, Wait, read
from sparkhvd.rendezvous.handshake import HELLO, SERVICE_STAGE, answer, introduce
from sparkhvd.runner.driver_port import listen, proof_between
from sparkhvd.runner.trainer import INTERRUPT_GRACE_S, Trainer
from sparkhvd.spark import SparkShim

# How long a task tries to reach the driver, in the background.
_CONNECT_S = 10.0
# How long a connection may take to authenticate as a task's.
_HANDSHAKE_S = 2.0
# How long ranks may take, beyond their grace, to be killed and reported.
_MARGIN_S = 2.0
# How long a task with an interrupted trainer waits for the driver, which releases all tasks together.
_RELEASE_S = INTERRUPT_GRACE_S + _MARGIN_S
# Longest wait of a selector, in whole days.
_FOREVER_S = 24.0 * 86400
# Pause between two polls for a trainer's end.
_POLL_S = 0.05
# Every task is number 1 at this port.
_PURPOSE = "interrupt"
_ENDED = b"\1"


class Interrupter:
    """Driver's side: a listening socket with the tasks in its backlog. A context manager."""

    def __init__(self, listening: socket.socket, host: str, job: Job, size: int) -> None:
        self._listening = listening
        self._job = job
        self._size = size
        self._num_ended = 0
        self._held: list[socket.socket] = []
        self.address = (host, int(listening.getsockname()[1]))

    @classmethod
    def listen(
        cls, shim: SparkShim, key: str, job_id: str, attempt: int, size: int
    ) -> Interrupter | None:
        """Listen for the tasks of an attempt.

        Return None outside the main thread, because only that thread gets Ctrl-C, or without an address.

        Args:
            shim: session, which provides the address at which executors reach this process.
            key: of the attempt, in hex.
            job_id: of the attempt.
            attempt: 0 for the first launch.
            size: number of ranks.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        # A job can run without it: then Ctrl-C has Spark's own effect.
        with contextlib.suppress(Exception):
            listening, host = listen(shim)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return cls(listening, host, proof_between(_PURPOSE, key, job_id, attempt, 0, 2), size)
        return None

    def interrupt(self) -> None:
        """Interrupt the ranks and wait for their end. Leaving early kills the remaining ranks."""
        loop = EventLoop()
        until = time.monotonic() + INTERRUPT_GRACE_S + _MARGIN_S
        try:
            with contextlib.suppress(OSError):  # BlockingIOError: that was the last connection
                while True:
                    sock, _ = self._listening.accept()
                    self._held.append(sock)
                    sock.setblocking(False)
                    loop.start(self._end(sock, until))
            loop.run(lambda: self._num_ended >= self._size or loop.is_idle())
        finally:
            loop.close()
            for sock in self._held:
                sock.close()

    def _end(self, sock: socket.socket, until: float) -> Task:
        """Interrupt one rank and wait for its end.

        Its connection stays open until all ranks have ended.
        """
        with contextlib.suppress(OSError):  # the peer is no task, or has ended
            known_until = time.monotonic() + _HANDSHAKE_S
            hello = yield from read(sock, HELLO.size, known_until)
            if (yield from answer(self._job, SERVICE_STAGE, hello, sock, known_until)) is None:
                sock.close()
                return
            with contextlib.suppress(OSError):
                yield from read(sock, len(_ENDED), until)
            self._num_ended += 1

    def __enter__(self) -> Interrupter:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()


class InterruptWatch:
    """Task's side: interruption of the trainer at the driver's request. A context manager.

    At the end of the block it waits for the driver if the trainer was interrupted.
    """

    def __init__(
        self, address: tuple[str, int], key: str, job_id: str, attempt: int, trainer: Trainer
    ) -> None:
        """Connect and watch in a thread.

        Args:
            address: `Interrupter.address`.
            key: of the attempt, in hex.
            job_id: of the attempt.
            attempt: 0 for the first launch.
            trainer: to interrupt.
        """
        self._address = address
        self._job = proof_between(_PURPOSE, key, job_id, attempt, 1, 2)
        self._trainer = trainer
        self._sock: socket.socket | None = None
        self._is_over = threading.Event()
        self._is_interrupted = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sparkhvd-interrupt", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        with (
            contextlib.suppress(OSError),  # the driver cannot be reached, or is gone
            socket.create_connection(self._address, _CONNECT_S) as sock,
        ):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._sock = sock
            if self._is_over.is_set():
                return
            loop = EventLoop()
            try:
                loop.start(self._introduce(sock))
                loop.run(loop.is_idle)
            finally:
                loop.close()
            if self._is_interrupted.is_set():
                self._interrupt(sock)

    def _introduce(self, sock: socket.socket) -> Generator[Wait, None, None]:
        if (yield from introduce(self._job, 0, SERVICE_STAGE, sock, time.monotonic() + _FOREVER_S)):
            self._is_interrupted.set()

    def _interrupt(self, sock: socket.socket) -> None:
        self._trainer.interrupt()
        until = time.monotonic() + INTERRUPT_GRACE_S
        while not self._trainer.wait(_POLL_S):
            if _is_closed(sock):
                self._trainer.kill()
                return
            if time.monotonic() > until:
                self._trainer.give_up(f"{INTERRUPT_GRACE_S:.0f} s after it was interrupted")
                break
        self._trainer.wait(_MARGIN_S)
        sock.settimeout(_RELEASE_S)
        sock.sendall(_ENDED)
        sock.recv(1)

    def __enter__(self) -> InterruptWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._is_interrupted.is_set():
            self._thread.join(INTERRUPT_GRACE_S + _MARGIN_S + _RELEASE_S)
        elif self._sock is not None:
            with contextlib.suppress(OSError):  # the thread has closed it
                self._sock.shutdown(socket.SHUT_RDWR)


def _is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
