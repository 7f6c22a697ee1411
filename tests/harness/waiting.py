"""Waiting for an action of another thread or process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], what: str, *, within_s: float = 20, every_s: float = 0.02
) -> T:
    """Wait for the first true result of `condition` and return it. The test fails if there is none in time.

    Args:
        condition: called repeatedly, at least twice.
        what: expected event, as in "the lease is renewed".
        within_s: time limit in seconds.
        every_s: seconds between two calls.
    """
    deadline = time.monotonic() + within_s
    while True:
        is_last = time.monotonic() > deadline
        if found := condition():
            return found
        assert not is_last, f"not within {within_s:g} s: {what}; last seen: {found!r}"
        time.sleep(every_s)


def wait_until_no_checkpoint_is_written() -> None:
    """Wait for the checkpoint of a step or epoch in a rank that is a thread, because no other is taken while it is written."""

    def is_idle() -> bool:
        return all(thread.name != "sparkhvd-checkpoint" for thread in threading.enumerate())

    wait_until(is_idle, "the checkpoint is written", every_s=0.005)
