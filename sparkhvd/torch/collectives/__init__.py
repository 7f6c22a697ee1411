"""Collectives on torch tensors, in Horovod's signatures, waiting and asynchronous; one file per family.

The asynchronous forms return a `Handle` at once; `synchronize(handle)` waits and gives the result,
`poll(handle)` only looks. A tensor that was handed over must not be changed before that.
"""

from __future__ import annotations

from sparkhvd.torch.collectives.allgathers import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from sparkhvd.torch.collectives.allreduces import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from sparkhvd.torch.collectives.alltoalls import alltoall, alltoall_async
from sparkhvd.torch.collectives.barriers import barrier, join
from sparkhvd.torch.collectives.broadcasts import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from sparkhvd.torch.collectives.handles import Handle, poll, synchronize
from sparkhvd.torch.collectives.reducescatters import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from sparkhvd.torch.collectives.reductions import Adasum, Average, Max, Min, Product, Sum
from sparkhvd.torch.collectives.sparse import sparse_allreduce_async

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
