"""Collectives on torch tensors, in Horovod's signatures, blocking and asynchronous.

There is one file per family. The asynchronous forms return a `Handle` at once. `synchronize(handle)` waits and returns
the result, and `poll(handle)` never waits. A submitted tensor must not be changed before the operation has finished.

Order: ranks may submit operations in any order; they match by name, or by their number among operations of a kind.

Failure: arguments are checked before anything is sent. Ranks that disagree get a `MismatchError` each; after any other
`CollectiveError` the contents of tensors in flight are undefined.

Each module imports only those above it:

    barriers        barrier, join
    tensors         checks, element types and memory of tensors
    cuda            Adasum of tensors on a GPU
    messages        send, recv
    allreduces      allreduce
    allgathers      allgather
    broadcasts      broadcast
    alltoalls       alltoall
    reducescatters  reducescatter
    sparse          sparse tensors
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
from sparkhvd.torch.collectives.messages import recv, recv_async, send, send_async
from sparkhvd.torch.collectives.reducescatters import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from sparkhvd.torch.collectives.sparse import sparse_allreduce_async
from sparkhvd.torch.collectives.tensors import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    poll,
    synchronize,
)

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
