"""Place of a rank in its job, known before `init()`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RankContext", "context"]


@dataclass(frozen=True)
class RankContext:
    """Place of this process in its job.

    Attributes:
        rank: index of this process, 0 to size - 1.
        size: number of processes in the job.
        local_rank: index among the job's processes on this host.
        attempt: 0 for the first launch of the job, then one more per relaunch.
        num_threads: threads this process may use; already set for OpenMP and MKL.
        gpu: ordinal of this rank's GPU in this process, which `sparkhvd.torch.init()` makes the current one; None if the
            rank has none. It is the local rank where this process sees the GPUs of all ranks of its host, and 0 where it
            sees only its own.
    """

    rank: int
    size: int
    local_rank: int
    attempt: int
    num_threads: int
    gpu: int | None = None


# At most one entry: a trainer process sets it once, before the user's function runs.
_installed: list[RankContext] = []


def context() -> RankContext | None:
    """Return the place of this process in its job; None in a process that the runner did not start.

    Known before `init()`, so a rank can choose its device or its files first.
    """
    return _installed[-1] if _installed else None


def install(value: RankContext | None) -> None:
    """Set the result of `context()`; called by the trainer process."""
    _installed[:] = [] if value is None else [value]
