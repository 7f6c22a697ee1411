"""The engine as a backend of torch.distributed: `import sparkhvd.distributed`, then `init_process_group("sparkhvd")`.

Code that calls torch.distributed runs on it unmodified: DDP, FSDP2, Lightning, Accelerate. docs/torch_distributed.md lists the methods
that torch calls and what is not supported.

Resources: one engine per process, shared with `sparkhvd.torch`; a group of some ranks is a process set. Groups that torch creates
on their members alone have their own engines, which end with them. The shared engine ends with `hvd.shutdown()` or the process.

Threads: any thread may call; a waiter drives the engine. One thread completes pending futures.

Failure: errors of the engine are also torch's `DistBackendError`. After the loss of a rank every operation raises. Destroy the
group, and create a new one with the remaining ranks.

Each module imports only those above it:

    extras         functions that torch offers for its own backends only
    inner          groups of torch's own backends inside one of ours
    work           errors of the engine as torch's
    launch         tensors as flat memory of the engine's types
    engines        ranks find each other through torch's store
    reconfigure    groups that change their ranks
    process_group  torch's reductions as plans of the engine's
    hooks          communication hooks of DDP
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import new_group

from sparkhvd.distributed.engines import EngineGroups, own
from sparkhvd.distributed.extras import monitored_barrier, split_group
from sparkhvd.distributed.hooks import PowerSGDState, ddp_hook, powersgd_hook
from sparkhvd.distributed.process_group import Group
from sparkhvd.distributed.reconfigure import Reconfiguration, UnconnectedGroup
from sparkhvd.distributed.work import CollectiveError, CollectiveTimeoutError, PeerLostError

__all__ = [
    "CollectiveError",
    "CollectiveTimeoutError",
    "Group",
    "PeerLostError",
    "PowerSGDState",
    "ddp_hook",
    "monitored_barrier",
    "new_group",
    "powersgd_hook",
    "register",
    "split_group",
]


def _create(options: Any, inner_options: object) -> Group:
    """Create the group; torch calls this on its members."""
    store, name, rank = options.store, options.group_id, options.group_rank
    size, timeout = options.group_size, options.timeout
    teams = EngineGroups()
    if getattr(options, "enable_reconfigure", False):  # since torch 2.14
        changes = Reconfiguration(rank, name, store)
        ranks = UnconnectedGroup(size)
        return Group(teams, ranks, rank, name, store, timeout, inner_options, changes)
    make = (
        own if options.global_ranks_in_group else teams.world
    )  # torch lists no ranks of a default group
    team = make(store, name, rank, size, timeout)
    return Group(teams, team, rank, name, store, timeout, inner_options)


def register() -> None:
    """Do nothing: the import of this package has registered the backend.

    Torch 2.14 and newer find this function by its entry point, so programs need not import this package.
    """


dist.Backend.register_backend("sparkhvd", _create, extended_api=True, devices=["cpu", "cuda"])
