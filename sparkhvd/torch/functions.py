"""Horovod's `functions` module, for programs that import `broadcast_parameters` and similar names from it.

New code imports the names from `sparkhvd.torch`.
"""

from sparkhvd.torch.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
