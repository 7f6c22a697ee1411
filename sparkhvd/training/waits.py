"""Time in which the ranks of an epoch waited for each other."""

from __future__ import annotations

from torch import Tensor

__all__ = ["waits"]


def waits(waited_s: Tensor) -> dict[str, float | int]:
    """Return what the ranks waited for in an epoch.

    The rank that is last to a reduction waits for the bytes alone: what the others wait longer, they wait for it.

    Args:
        waited_s: (ranks,) seconds that each has waited for reduced gradients.

    Returns:
        "comm_wait_s": seconds of the rank that waited least; "rank_wait_s": how much longer the one waited that waited most;
        "slowest_rank": the former.
    """
    least, most = float(waited_s.min()), float(waited_s.max())
    return {
        "comm_wait_s": least,
        "rank_wait_s": most - least,
        "slowest_rank": int(waited_s.argmin()),
    }
