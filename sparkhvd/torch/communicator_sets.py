"""Process sets from MPI communicators or from ranks.

Processes may pass different communicators in the same call, such as the results of `Split`. Every rank then registers
all of the sets, and gets the set with its own process as the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers import mpi
from sparkhvd.launchers.mpi import Communicator
from sparkhvd.torch import process_sets
from sparkhvd.torch.collectives import allgather
from sparkhvd.torch.context import context
from sparkhvd.torch.process_sets import ProcessSet

_WHAT = "add_process_set(ProcessSet(<communicator>))"


def add_process_set(process_set: ProcessSet | Sequence[int] | Communicator) -> ProcessSet:
    """Register a process set. Every rank of the job must call this with the same ranks.

    Waits for all ranks. With MPI communicators every rank passes its own communicator, or MPI.COMM_NULL. Each
    communicator of a `Split` becomes a set, and the result is the set of this process (the first set for a process
    without one). The communicator is not used later.

    Args:
        process_set: an unregistered set, its ranks, or a communicator.

    Returns:
        The registered set.

    Raises:
        InvalidArgumentError: a rank is not an integer or does not exist, a set of these ranks is registered already, or ranks of a
            communicator are not ranks of the job or pass another communicator.
        MismatchError: ranks disagree on the set; raised on every rank.
        CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    if mpi.is_communicator(process_set):
        process_set = ProcessSet(process_set)
    if isinstance(process_set, ProcessSet) and process_set.mpi_comm is not None:
        return _add_of_communicators(process_set, process_set.mpi_comm)
    return process_sets.add_process_set(process_set)  # type: ignore[arg-type]  # no communicator


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank must call this. The object may be added again.

    Sets that were registered together, from communicators that differ between ranks, are removed together.

    Returns:
        False, without any effect, for the set of all ranks and for an unregistered set.

    Raises:
        InvalidArgumentError: it is not a process set.
        MismatchError, CollectiveTimeoutError, PeerLostError: as for `add_process_set`.
    """
    together = process_set.together if isinstance(process_set, ProcessSet) else ()
    return all([process_sets.remove_process_set(each) for each in together or (process_set,)])


def _add_of_communicators(process_set: ProcessSet, comm: Communicator) -> ProcessSet:
    current = context()
    if process_set.process_set_id is not None:
        raise InvalidArgumentError(
            f"{_WHAT}: {process_set} is registered already. Use it as it is."
        )
    own = _ranks_in(comm, current.engine.settings.start_timeout_s)
    sets = _agree(_gather(own), current.engine.topology.size)
    mine = own if own in sets else sets[0]
    made = tuple(process_set if ranks == mine else ProcessSet(ranks) for ranks in sets)
    for each, ranks in zip(made, sets, strict=True):
        each.take(ranks)
        process_sets.check_new(current, each)
    for each in made:
        process_sets.add_process_set(each)
    process_set.together = made
    return process_set


def _ranks_in(comm: Communicator, timeout_s: float) -> tuple[int, ...]:
    """Gather the job ranks of the communicator's processes.

    The result is empty for a null communicator.
    """
    if not comm:
        return ()
    mpi.place_of(_WHAT, comm)
    rank = context().engine.topology.rank
    return tuple(sorted(map(int, mpi.gather(_WHAT, comm, str(rank), timeout_s))))


def _gather(own: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Gather every rank's `own`, by rank."""
    numbers = allgather(torch.tensor([len(own), *own]), name="process_sets.of_communicators")
    left, claims = numbers.tolist(), []
    while left:
        claims.append(tuple(left[1 : 1 + left[0]]))
        del left[: 1 + left[0]]
    return claims


def _agree(claims: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Find the distinct sets in the ranks' claims, sorted by their ranks.

    Raises:
        InvalidArgumentError: no rank passed a communicator, or processes of a communicator passed another communicator.
    """
    sets = sorted({ranks for ranks in claims if ranks})
    if not sets:
        raise InvalidArgumentError(
            f"{_WHAT}: every rank passed a null communicator. A process set needs at least one rank."
        )
    for ranks in sets:
        for rank in ranks:
            if claims[rank] != ranks:
                raise InvalidArgumentError(
                    f"{_WHAT}: the communicator of ranks {list(ranks)} has rank {rank}, but rank {rank} passed a "
                    f"communicator of ranks {list(claims[rank])}. Pass the same communicator on each of its processes; "
                    f"all {size} ranks must call this."
                )
    return sets
