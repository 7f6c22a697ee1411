"""What torch.distributed offers for its own backends only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from sparkhvd.errors import InvalidArgumentError

__all__ = ["monitored_barrier", "split_group"]


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,  # noqa: ARG001 - torch's argument
) -> None:
    """Wait for every rank; where some do not come in time, name them: `torch.distributed.monitored_barrier` is Gloo's alone.

    Args:
        group: None = the default one.
        timeout: None = the group's.
        wait_all_ranks: torch's; the ranks that have not come are always named together.

    Raises:
        CollectiveTimeoutError: some did not come.
    """
    options = dist.BarrierOptions()
    options.asyncOp = False
    if timeout is not None:
        options.timeout = timeout
    (group or dist.group.WORLD).barrier(options).wait()  # type: ignore[union-attr]  # there is one, or torch says so


def split_group(split_ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Divide the default group: `torch.distributed.split_group` wants an accelerator. Every rank must call this.

    Args:
        split_ranks: ranks of each new group; none is in two.

    Returns:
        This rank's new group; None where it is in none.

    Raises:
        InvalidArgumentError: a rank is in two of them.
    """
    ranks = [rank for part in split_ranks for rank in part]
    if len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(
            f"split_group({list(split_ranks)!r}): a rank is in two groups. Use torch.distributed.new_group()."
        )
    groups = [dist.new_group(list(part)) for part in split_ranks]
    mine = [
        group for group, part in zip(groups, split_ranks, strict=True) if dist.get_rank() in part
    ]
    return mine[0] if mine else None
