"""Functions of torch.distributed, without their limit to torch's own backends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import new_group

from sparkhvd.errors import InvalidArgumentError


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for every rank, like `torch.distributed.monitored_barrier`.

    torch's own function supports only Gloo before torch 2.14.

    Args:
        group: the group; None means the default group. Ranks that are not members return at once.
        timeout: the timeout; None means the group's timeout.
        wait_all_ranks: name all missing ranks instead of the first.

    Raises:
        CollectiveTimeoutError: ranks are missing; on rank 0 the message names them.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is not outside:
        given: Any = _given(group)
        given.monitored_barrier(timeout, wait_all_ranks)


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] = (),
    timeout: timedelta | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> dist.ProcessGroup | None:
    """Split a group, like `torch.distributed.split_group`. Every rank must call this.

    torch's own function needs an accelerator.

    Args:
        parent_pg: None = the default group. Parts of another group get their own engines.
        split_ranks: ranks in `parent_pg` of each new group, ascending; a rank may be in one group only.
        timeout: of the new groups; None = torch's default.
        pg_options: for an inner backend of torch's.
        group_desc: torch's description of the new groups.

    Returns:
        This rank's new group; None without one.

    Raises:
        InvalidArgumentError: there are no groups, a rank is in two of them, or is not in `parent_pg`.
    """
    parent = _given(parent_pg)
    members = dist.get_process_group_ranks(parent)
    ranks = sorted(rank for part in split_ranks for rank in part)
    if not ranks or ranks != sorted(set(ranks) & set(range(len(members)))):
        raise InvalidArgumentError(
            f"split_group(split_ranks={[list(part) for part in split_ranks]!r}): give at least one group; each rank from 0 to "
            f"{len(members) - 1} may be in one group only. Use torch.distributed.new_group() for groups that overlap."
        )
    parts = [[members[rank] for rank in sorted(part)] for part in split_ranks]
    is_mine = [dist.get_rank() in part for part in parts]
    is_whole = parent is dist.group.WORLD
    # Only the members of a group other than the default group can create groups in it.
    made: list[dist.ProcessGroup] = [
        new_group(
            part,
            timeout,
            pg_options=pg_options,
            use_local_synchronization=not is_whole,
            group_desc=group_desc,
        )
        for part, mine in zip(parts, is_mine, strict=True)
        if is_whole or mine
    ]
    if not any(is_mine):
        return None
    return made[is_mine.index(True) if is_whole else 0]


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    if found is None:
        raise ValueError("there is no default process group. Call init_process_group() first.")
    return found
