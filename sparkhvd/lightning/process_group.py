"""The default group of torch.distributed over the engine of the job, for what Lightning and torchmetrics ask torch for.

The ranks meet through a store that rank 0 serves on a port of its own: launchers do not all give an address (`MASTER_ADDR`), and
Lightning takes `WORLD_SIZE` out of the environment. Ranks of one host reach it by loopback alone.

Trust: whoever reaches the store can write to it, as to every store of torch. No key goes through it: the engine is there before.
"""

from __future__ import annotations

import socket
import weakref

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

import sparkhvd.distributed  # noqa: F401 - registers the backend
from sparkhvd import rendezvous
from sparkhvd.engine.engine import Engine
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.interfaces import own_address
from sparkhvd.torch import broadcast_object
from sparkhvd.torch.context import context

__all__ = ["ensure"]

# The engine of the group that this module has made last.
_made: list[weakref.ref[Engine]] = []


def ensure() -> None:
    """Make the default group of all ranks, unless there is one; every rank must call it, after `init()`.

    Raises:
        InvalidArgumentError: the program has made a default group of other ranks.
        CollectiveError: a rank is lost, or does not come.
    """
    engine = context().engine
    if dist.is_initialized():
        if not _made or _made[0]() is engine:
            _check_place(engine)
            return
        dist.destroy_process_group()  # of a job that has ended
    dist.init_process_group(
        "sparkhvd", store=_store(engine), rank=engine.rank, world_size=engine.size
    )
    _made[:] = [weakref.ref(engine)]


def _check_place(engine: Engine) -> None:
    found = dist.get_rank(), dist.get_world_size()
    if found != (engine.rank, engine.size):
        raise InvalidArgumentError(
            f"SparkhvdStrategy: this process is rank {found[0]} of {found[1]} in torch.distributed's default group, and rank "
            f"{engine.rank} of {engine.size} in sparkhvd's job. Leave init_process_group() to the strategy."
        )


def _store(engine: Engine) -> Store:
    """Return a store of all ranks, served by rank 0."""
    if engine.size == 1:
        return HashStore()
    served = address = None
    if engine.rank == 0:
        own = _address(engine)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener = socket.create_server((own, 0), family=family)
        address = listener.getsockname()[:2]
        served = TCPStore(
            address[0],
            address[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
            use_libuv=False,  # which does not take a socket in every version of torch
        )
    address = broadcast_object(address, root_rank=0, name="lightning.store")
    host, port = address
    return served or TCPStore(host, port, wait_for_workers=False, use_libuv=False)


def _address(engine: Engine) -> str:
    """Return the address of this rank, the first, at which the others reach it."""
    if len(set(engine.topology.hosts)) == 1:
        return "127.0.0.1"
    launched = rendezvous.current()
    if isinstance(launched, rendezvous.SocketRendezvous):
        return launched.job.endpoints[0].address
    return own_address(engine.settings.interfaces, socket.gethostname())
