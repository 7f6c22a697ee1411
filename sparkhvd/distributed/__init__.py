"""The engine as a backend of torch.distributed: `import sparkhvd.distributed`, then `init_process_group("sparkhvd")`.

Code that calls torch.distributed runs unmodified: DDP, FSDP2, Lightning, Accelerate. docs/torch_distributed.md lists
the methods that torch calls and what is not supported.

Resources: each process has one engine, shared with `sparkhvd.torch`; a group of some ranks is a process set. A group
    that
torch creates on its members only has its own engine, which ends with the group. The shared engine ends with
`hvd.shutdown()` or with the process.

Threads: any thread may call. A thread that waits drives the engine. One background thread completes pending futures.

Failure: errors of the engine are also torch's `DistBackendError`. After the loss of a rank every operation raises.
    Destroy
the group, and create a new group with the remaining ranks.

Each module imports only those above it:

    extras         functions that torch offers only for its own backends
    inner          groups of torch's own backends inside a group of ours
    work           operations in flight, as torch's works and futures
    launch         launch of collectives on torch's tensors
    engines        engines and process sets of groups
    reconfigure    groups that change their ranks
    process_group  the process group that torch calls
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
    """Create a group. torch calls this on the members of the group."""
    store, name, rank = options.store, options.group_id, options.group_rank
    size, timeout = options.group_size, options.timeout
    teams = EngineGroups()
    if getattr(options, "enable_reconfigure", False):  # since torch 2.14
        changes = Reconfiguration(rank, name, store)
        ranks = UnconnectedGroup(size)
        return Group(teams, ranks, rank, name, store, timeout, inner_options, changes)
    make = (
        own if options.global_ranks_in_group else teams.world
    )  # torch gives no list of ranks for a default group
    team = make(store, name, rank, size, timeout)
    return Group(teams, team, rank, name, store, timeout, inner_options)


def register() -> None:
    """Do nothing, because the import of this package has registered the backend.

    Torch 2.14 and newer find this function by an entry point, so programs need not import this package.
    """


dist.Backend.register_backend("sparkhvd", _create, extended_api=True, devices=["cpu", "cuda"])
