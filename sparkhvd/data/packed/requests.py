"""Reads of a remote file, several at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["together"]

# Each column of a row group is a request of its own, which mostly waits.
_THREADS = 12
# The longest wait for all of them.
_REQUESTS_S = 3600.0


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls that wait for a remote store, a few at a time; raise the first error when all have ended.

    Raises:
        TimeoutError: the store has not answered some of them for an hour.
    """
    waiting = iter(calls)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                call = next(waiting, None)
            if call is None:
                return
            try:
                call()
            except BaseException as e:  # noqa: BLE001 - it is raised below
                errors.append(e)

    # Daemons, because a read may never return.
    threads = [
        threading.Thread(target=work, name="sparkhvd-read", daemon=True)
        for _ in range(min(_THREADS, len(calls)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    deadline = time.monotonic() + _REQUESTS_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"requests to the store have not been answered for {_REQUESTS_S:g} s")
    if errors:
        raise errors[0]
