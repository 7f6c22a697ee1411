"""Horovod's `functions` module, for imports of `broadcast_parameters` and similar names.

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
