"""The process's own rendezvous: at most one."""

from __future__ import annotations

from sparkhvd.rendezvous.connections import Rendezvous

__all__ = ["current", "install"]

_installed: list[Rendezvous] = []


def install(rendezvous: Rendezvous | None) -> None:
    """Set what `current()` returns; called by whoever started this process, before user code."""
    _installed[:] = [] if rendezvous is None else [rendezvous]


def current() -> Rendezvous | None:
    """The rendezvous that was installed in this process; None if nobody launched it."""
    return _installed[0] if _installed else None
