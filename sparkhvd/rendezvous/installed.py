"""Rendezvous of this process: at most one."""

from __future__ import annotations

import os

from sparkhvd.errors import NotInitializedError
from sparkhvd.rendezvous.connections import Rendezvous

__all__ = ["current", "install"]

# With the id of the process that was launched.
_installed: list[tuple[Rendezvous, int]] = []


def install(rendezvous: Rendezvous | None) -> None:
    """Set the result of `current()`; called by the launcher of this process, before user code."""
    _installed[:] = [] if rendezvous is None else [(rendezvous, os.getpid())]


def current() -> Rendezvous | None:
    """Return the rendezvous of this process; None if it was not launched as a rank.

    Raises:
        NotInitializedError: this process was forked by one that was launched.
    """
    if not _installed:
        return None
    rendezvous, pid = _installed[0]
    if os.getpid() != pid:
        raise NotInitializedError(
            f"init(): process {os.getpid()} was forked by rank {rendezvous.rank} (process {pid}) and is not a rank itself. "
            "Let the rank communicate and hand the results over, start more ranks with num_proc, or let the rank start a program: without "
            "SPARKHVD_PLACE in its environment that is a job of its own."
        )
    return rendezvous
