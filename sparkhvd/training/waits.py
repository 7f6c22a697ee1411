"""Time in which the ranks of an epoch waited for each other."""

from __future__ import annotations

import torch

import sparkhvd.torch as hvd

__all__ = ["waits"]


def waits(waited_s: float) -> dict[str, float | int]:
    """Return what the ranks waited for in an epoch; every rank must call it.

    The rank that is last to a reduction waits for the bytes alone: what the others wait longer, they wait for it.

    Args:
        waited_s: seconds that this rank has waited for reduced gradients.

    Returns:
        "comm_wait_s": seconds of the rank that waited least; "rank_wait_s": how much longer the one waited that waited most;
        "slowest_rank": the former.
    """
    found = hvd.allgather(torch.tensor([waited_s], dtype=torch.float64), name="epoch.waits")
    least, most = float(found.min()), float(found.max())
    return {
        "comm_wait_s": least,
        "rank_wait_s": most - least,
        "slowest_rank": int(found.argmin()),
    }
