"""Interpretation of `init(comm=...)`: a rendezvous, ranks of the launcher's job, or an MPI communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

import torch

from sparkhvd import launchers
from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.launchers import mpi
from sparkhvd.rendezvous import Rendezvous, SingleRendezvous, SocketRendezvous
from sparkhvd.settings import Settings
from sparkhvd.topology import RankContext, install_rank_context, topology
from sparkhvd.topology import context as rank_context
from sparkhvd.torch.arguments import to_integers, to_list
from sparkhvd.torch.context import context

Comm = Rendezvous | mpi.Communicator | Sequence[int]
# Function that connects the ranks. It registers on its argument the resources to close at the end of the job.
Join = Callable[[ExitStack], Rendezvous]


def way_to_join(comm: Comm | None) -> Join:
    """Choose the function to connect the ranks.

    Raises:
        InvalidArgumentError: `init` does not support `comm`.
    """
    if comm is None:
        return lambda _: _launched()
    if mpi.is_communicator(comm):
        return lambda cleanup: mpi.join(comm, cleanup)
    if hasattr(comm, "connect"):
        rendezvous = cast("Rendezvous", comm)
        return lambda _: rendezvous
    ranks = _ranks(cast("Sequence[int]", comm))  # raises an error for anything else
    return lambda cleanup: _among(ranks, cleanup)


def check_joined(comm: Comm | None, before: object) -> None:
    """Refuse a communicator or ranks different from this process's job.

    Args:
        comm: argument of this call.
        before: argument of the call that joined the job.

    Raises:
        InvalidArgumentError: size, rank or processes differ.
    """
    place = context().engine.topology
    joined = f"this process is rank {place.rank} of a job of {place.size} ranks already"
    remedy = "Call shutdown() first, on every rank, or init() once."
    if mpi.is_communicator(comm):
        rank, size = mpi.place_of("init(comm=...)", comm)
        if (rank, size) != (place.rank, place.size):
            raise InvalidArgumentError(
                f"init(comm=...): this process is rank {rank} of {size} in the communicator, but {joined}. {remedy}"
            )
        if mpi.is_communicator(before) and mpi.are_others(before, comm):
            raise InvalidArgumentError(
                f"init(comm=...): the communicator has other processes than the communicator of the first init(), and {joined}. {remedy}"
            )
    elif comm is not None and not hasattr(comm, "connect"):
        ranks = _ranks(cast("Sequence[int]", comm))
        if len(ranks) != place.size:
            raise InvalidArgumentError(
                f"init(comm={ranks}): these are {len(ranks)} ranks, but {joined}. {remedy}"
            )


def _launched() -> Rendezvous:
    return launchers.find() or SingleRendezvous(Settings.resolve())


def _ranks(comm: Sequence[int]) -> list[int]:
    items = to_list(f"init(comm={comm!r})", comm, "ranks")
    if any(map(mpi.is_communicator, items)):
        raise InvalidArgumentError(
            f"init(comm={items!r}): a process can join only one job. Give the communicator of all processes as comm, and the other "
            "communicators as process_sets, such as init(comm=MPI.COMM_WORLD, process_sets=[ProcessSet(part)])."
        )
    ranks = to_integers(items)
    if ranks is None:
        raise InvalidArgumentError(
            f"init(comm={items!r}): expected a list of ranks, which are integers. Leave comm out to use all ranks of the job."
        )
    return ranks


def _among(ranks: list[int], cleanup: ExitStack) -> Rendezvous:
    """Make a separate job of some ranks of the launcher's job."""
    world = _launched()
    what = f"init(comm={ranks})"
    if isinstance(world, ElasticRendezvous):
        raise InvalidArgumentError(
            f"{what}: a list of ranks is not possible in an elastic job, because its ranks change. Leave comm out to use all "
            "ranks."
        )
    if ranks == list(range(world.size)):
        return world
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= world.size:
        raise InvalidArgumentError(
            f"{what}: the launcher's ranks are 0 to {world.size - 1}. Give each rank that takes part once, or leave comm out."
        )
    if world.rank not in ranks:
        raise InvalidArgumentError(
            f"{what}: this process is the launcher's rank {world.rank}, which is not in the list. Add the rank to the list, or "
            "do not call init() in this process."
        )
    if not isinstance(world, SocketRendezvous):
        raise InvalidArgumentError(
            f"{what}: this launcher does not support a separate job of some ranks. Leave comm out, and give process_sets for "
            "operations among some of the ranks."
        )
    chosen = world.among(ranks)
    before = rank_context()
    if before is not None:
        hosts = [e.host_key or e.address for e in chosen.job.endpoints]
        place = topology(chosen.rank, hosts)
        made = RankContext(
            chosen.rank,
            chosen.size,
            place.local_rank,
            before.attempt,
            before.num_threads,
            before.gpu,
        )
        install_rank_context(made)
        cleanup.callback(install_rank_context, before)
    return chosen


# ----------------------------------------------------------------------------------------------------
# Selection of this rank's assigned GPU as torch's current device.


def make_current() -> None:
    """Make the GPU assigned by the launcher, if any, torch's current device in this thread.

    The process may see the GPUs of all ranks of its host. Without this call all ranks' tensors would be on the first
    GPU. Like `torch.cuda.set_device` in a script, the call starts CUDA and takes memory of the GPU. So it is skipped
    for the first GPU, which is the default anyway. A device that the script has selected does not change.
    """
    place = rank_context()
    own = None if place is None else place.gpu
    if not own or not torch.cuda.is_available() or own >= torch.cuda.device_count():
        return
    if torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return
    torch.cuda.set_device(own)


# ----------------------------------------------------------------------------------------------------
# Horovod's query functions about frameworks and numbers of ranks.


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for "torch" and False for other frameworks ("tensorflow", "mxnet")."""
    del verbose
    return ext_base_name == "torch"


def check_extension(
    ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: object
) -> None:
    """Raise an ImportError unless the framework of a module such as "horovod.torch" is supported."""
    del ext_env_var, pkg_path, args
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"sparkhvd has no frontend for {framework}. It supports only torch.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework sees a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return True for 1, 2, 4, 8, ... ranks, as required by Adasum."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
