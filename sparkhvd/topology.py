"""Topology: local and cross ranks, computed from the host of every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sparkhvd.errors import InvalidArgumentError

# Horovod's variables for the ranks and sizes of a process.
HOROVOD_NAMES = tuple(
    f"HOROVOD_{name}"
    for name in (
        "HOSTNAME",
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
    )
)


@dataclass(frozen=True)
class Topology:
    """Ranks and sizes of one process: of the world, of its host, and across hosts.

    Attributes:
        rank: index of this process in the world.
        size: number of processes in the world.
        local_rank: index among the ranks of this host.
        local_size: number of ranks on this host.
        cross_rank: index of this host among the hosts that have a rank with this `local_rank`.
        cross_size: number of those hosts.
        hosts: index of the host of every rank, numbered by first appearance.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[int, ...]

    @property
    def is_homogeneous(self) -> bool:
        """True if every host has the same number of ranks."""
        counts = {self.hosts.count(host) for host in set(self.hosts)}
        return len(counts) == 1


def topology(rank: int, hosts: Sequence[Hashable]) -> Topology:
    """Compute the topology of `rank`, if rank r runs on `hosts[r]`.

    Args:
        rank: the rank to describe.
        hosts: name or number of the host of each rank, by rank.

    Raises:
        InvalidArgumentError: `rank` is not one of the ranks.
    """
    size = len(hosts)
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"topology(rank={rank}): there are {size} ranks. Give a rank from 0 to {size - 1}."
        )
    numbers: dict[Hashable, int] = {}
    indices = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
    # Rank among the ranks of its own host, for every rank.
    local_ranks = [indices[:r].count(indices[r]) for r in range(size)]
    peers = [r for r in range(size) if local_ranks[r] == local_ranks[rank]]
    return Topology(
        rank=rank,
        size=size,
        local_rank=local_ranks[rank],
        local_size=indices.count(indices[rank]),
        # One rank per host has this local rank; hosts are numbered by first appearance.
        cross_rank=sum(indices[r] < indices[rank] for r in peers),
        cross_size=len(peers),
        hosts=indices,
    )


def horovod_variables(place: Topology, host: str) -> dict[str, str]:
    """Values of `HOROVOD_NAMES` for a rank.

    Args:
        place: topology of the rank.
        host: name of its host.
    """
    values = (
        host,
        *(place.rank, place.size),
        *(place.local_rank, place.local_size),
        *(place.cross_rank, place.cross_size),
    )
    return {name: str(value) for name, value in zip(HOROVOD_NAMES, values, strict=True)}


# ----------------------------------------------------------------------------------------------------
# Rank, size and resources of a process, known before `init()`.


@dataclass(frozen=True)
class RankContext:
    """Rank, size and resources of this process.

    Attributes:
        rank: index of this process, 0 to size - 1.
        size: number of processes in the job.
        local_rank: index among the job's processes on this host.
        attempt: 0 for the first launch of the job, then one more per relaunch.
        num_threads: threads that this process may use; already set for OpenMP and MKL.
        gpu: ordinal of this rank's GPU in this process, which `sparkhvd.torch.init()` makes the current one; None
            without a GPU. It is the local rank if this process sees the GPUs of all ranks of its host, and 0 if it sees
            only its own.
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
    """Get the rank, size and resources of this process, or None if it is not (yet) a rank.

    The runner sets it before `init()`, so a rank can choose its device or its files first.
    """
    return _installed[-1] if _installed else None


def install_rank_context(value: RankContext | None) -> None:
    """Set the result of `context()`."""
    _installed[:] = [] if value is None else [value]
