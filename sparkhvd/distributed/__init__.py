"""The engine as a backend of torch.distributed: `import sparkhvd.distributed`, then `init_process_group("sparkhvd")`.

Everything that calls torch.distributed runs on it unmodified: DDP, FSDP2, Lightning, Accelerate. What torch calls of a backend, and
what is not offered: docs/torch_distributed.md.

Resources: one engine per process, shared with `sparkhvd.torch`; a group of some ranks is a process set. Groups that torch makes
on their members alone have engines of their own, which end with them; the shared one ends with `hvd.shutdown()` or the process.

Threads: any thread may call; a waiter drives the engine. One thread completes futures while there are any.

Failure: errors of the engine are also torch's `DistBackendError`. After the loss of a rank every operation raises; destroy the
group, and make a new one with the ranks that are left.

Each module imports only those above it:

    extras         what torch offers for its own backends only
    inner          groups of torch's own backends inside one of ours
    work           errors of the engine as torch's
    launch         tensors as flat memory of the engine's types
    engines        ranks find each other through torch's store
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
    """Make the group for torch, which calls this on its members."""
    store, name, rank = options.store, options.group_id, options.group_rank
    size, timeout = options.group_size, options.timeout
    teams = EngineGroups()
    make = (
        own if options.global_ranks_in_group else teams.world
    )  # torch lists no ranks of a default group
    team = make(store, name, rank, size, timeout)
    return Group(teams, team, rank, name, store, timeout, inner_options)


def register() -> None:
    """Do nothing: the import of this package has registered the backend.

    Torch 2.14 and newer find this function by its entry point, so programs need no import of ours.
    """


dist.Backend.register_backend("sparkhvd", _create, extended_api=True, devices=["cpu", "cuda"])
