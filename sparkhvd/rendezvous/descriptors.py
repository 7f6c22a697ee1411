"""Descriptors that the connections of a job need."""

from __future__ import annotations

__all__ = ["make_room", "most_ranks"]

# Unauthenticated connections, the engine's own descriptors, and the files of a program.
_OTHERS = 256


def _per_rank(streams: int) -> int:
    # A connection for control frames and `streams` for tensors, and for a moment the memory and the eventfd of each on its host.
    return streams + 3


def most_ranks(limit: int, streams: int) -> int:
    """Return how many ranks a job may have where each may open so many files."""
    return max(1, (limit - _OTHERS) // _per_rank(streams))


def make_room(size: int, streams: int) -> None:
    """Raise this process's soft limit of open files to the hard one, where a job of this size may not fit below it."""
    import resource  # absent on Windows, where a Connect client may import this file

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and size > most_ranks(soft, streams):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
