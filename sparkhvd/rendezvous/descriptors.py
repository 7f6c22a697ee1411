"""Descriptors that the connections of a job need."""

from __future__ import annotations

__all__ = ["make_room"]

# Unauthenticated connections, the engine's own descriptors, and the files of a program.
_OTHERS = 256


def make_room(size: int, streams: int) -> None:
    """Raise this process's soft limit of open files to the hard one, where a job of this size may not fit below it.

    A rank has a connection for control frames and `streams` for tensors to every other, and for a moment the memory and
    the eventfd of each on its host.
    """
    import resource  # absent on Windows, where a Connect client may import this file

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and size * (streams + 3) + _OTHERS > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
