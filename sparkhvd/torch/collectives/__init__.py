"""Collectives on torch tensors, in Horovod's signatures, waiting and asynchronous; one file per family.

The asynchronous forms return a `Handle` at once; `synchronize(handle)` waits and gives the result,
`poll(handle)` only looks. A tensor that was handed over must not be changed before that.

Order: ranks may submit operations in any order; they match by name, or by how many of a kind went before.

Failure: arguments are checked before anything is sent. Ranks that disagree get a `MismatchError` each; after any other
`CollectiveError` the contents of tensors in flight are undefined.

Each module imports only those above it:

    tensors          tensors as operands: types, checks, memory
    handles          `Handle`, `poll`, `synchronize`
    reductions       arguments of a reduction, checked
    groups           tensors of several types as one call
    cuda_adasum      Adasum of tensors on a GPU
    cuda_reductions  reductions and broadcasts on a GPU
    cuda_gathers     allgather and alltoall on a GPU
    allreduces       allreduce
    allgathers       allgather
    broadcasts       broadcast
    alltoalls        alltoall
    reducescatters   reducescatter
    barriers         barrier, join
    messages         send, recv
    sparse           sparse tensors
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
from sparkhvd.torch.collectives.messages import recv, recv_async, send, send_async
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
    "recv",
    "recv_async",
    "reducescatter",
    "reducescatter_async",
    "send",
    "send_async",
    "sparse_allreduce_async",
    "synchronize",
]
