"""Read ahead in a thread; its consumer waits with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

from sparkhvd.errors import InternalError, InvalidArgumentError

__all__ = ["READ_S", "STOP_S", "Prefetch"]


# The longest wait for one chunk, which may be all the rows of a slow store; and, at the end of an epoch, for a thread
# that is in a read which may never return (a mount whose server has gone).
READ_S = 3600.0
STOP_S = 60.0

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Runs an iterator in a thread, at most `length` items ahead."""

    def __init__(self, items: Iterator[Item], length: int) -> None:
        self._items = items
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(maxsize=length)
        self._length = length
        self._has_all = False  # nothing is read any more
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkhvd-reader", daemon=True)
        self._thread.start()

    @property
    def is_nearly_empty(self) -> bool:
        """True if everything has been read, and at most half of the room for it is taken."""
        return self._has_all and 2 * self._queue.qsize() <= self._length + 1

    def get(self) -> Item | BaseException:
        """Return the next item, or the error that ended the thread."""
        deadline = time.monotonic() + READ_S
        while not self._stopping.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return TimeoutError(f"nothing came for {READ_S:g} s, from the store or a decoder")
            try:
                return self._queue.get(timeout=min(left, 1.0))
            except queue.Empty:
                continue
        return InvalidArgumentError(
            "This epoch of the data has ended, because another one was begun or the data were closed: iterate over one at "
            "a time."
        )

    def stop(self, limit_s: float) -> bool:
        """End the thread and wait for it up to a limit; return True if it has ended."""
        self._stopping.set()
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            # A thread that waits for room in the queue goes on once there is some.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.05)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failure: BaseException
        try:
            for item in self._items:
                if self._stopping.is_set():
                    return
                self._queue.put(item)
                if self._stopping.is_set():
                    return
            self._has_all = True
            failure = InternalError("The reader ran out of rows before the epoch's end.")
        except BaseException as error:  # noqa: BLE001 - a door: the consumer raises it
            failure = error
        while not self._stopping.is_set():
            try:
                self._queue.put(failure, timeout=0.05)
            except queue.Full:
                continue
            return
