"""Horovod's API on sparkhvd's engine: `import sparkhvd.torch as hvd`.

A script for Horovod needs only this import changed. Call `init()` first; under `sparkhvd.runner.run` and
`TorchEstimator` it joins the ranks of the job, elsewhere it makes a job of one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from sparkhvd.torch import _context
from sparkhvd.torch.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sparkhvd.torch.collectives import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from sparkhvd.torch.compression import Compression
from sparkhvd.torch.optimizer import DistributedOptimizer
from sparkhvd.torch.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from sparkhvd.rendezvous import Rendezvous

__all__ = [
    "Adasum",
    "Average",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

# Horovod's names that this version does not have yet.
_LATER = frozenset(
    {
        "SyncBatchNorm",
        "add_process_set",
        "alltoall",
        "alltoall_async",
        "elastic",
        "grouped_allgather",
        "grouped_allgather_async",
        "grouped_reducescatter",
        "grouped_reducescatter_async",
        "join",
        "reducescatter",
        "reducescatter_async",
        "remove_process_set",
        "sparse_allreduce_async",
        "start_timeline",
        "stop_timeline",
    }
)


def __getattr__(name: str) -> NoReturn:
    later = " It is Horovod's, and not in this version of sparkhvd." if name in _LATER else ""
    raise AttributeError(f"module 'sparkhvd.torch' has no attribute {name!r}.{later}")


def init(rendezvous: Rendezvous | None = None) -> None:
    """Join the job; every rank must call it. Does nothing while initialised; works again after `shutdown()`.

    Args:
        rendezvous: how the ranks find each other; None means the job that this process was started for,
            or a job of one rank if it was started for none.

    Raises:
        CollectiveTimeoutError: a rank did not come within `Settings.connect_timeout_s`; the message names it.
        PeerLostError: a rank's process ended before it came.
        EngineUnavailableError: the compiled library is missing.
    """
    _context.initialize(rendezvous)


def shutdown() -> None:
    """Leave the job; operations in flight fail here and on the other ranks. Called at exit by itself."""
    _context.shut_down()


def is_initialized() -> bool:
    """Whether `init()` was called, and `shutdown()` was not."""
    return _context.is_initialized()


def rank() -> int:
    """This process's number, from 0 to `size() - 1`."""
    return _context.context().engine.topology.rank


def size() -> int:
    """Number of ranks."""
    return _context.context().engine.topology.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _context.context().engine.topology.local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return _context.context().engine.topology.local_size


def cross_rank() -> int:
    """Number of this host among the hosts that have a rank with this `local_rank()`."""
    return _context.context().engine.topology.cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank with this `local_rank()`."""
    return _context.context().engine.topology.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return _context.context().engine.topology.is_homogeneous


def mpi_built() -> bool:
    """False: sparkhvd has its own transport."""
    return False


def mpi_enabled() -> bool:
    """False: sparkhvd has its own transport."""
    return False


def mpi_threads_supported() -> bool:
    """False: MPI is not used."""
    return False


def gloo_built() -> bool:
    """False: sparkhvd has its own transport."""
    return False


def gloo_enabled() -> bool:
    """False: sparkhvd has its own transport."""
    return False


def nccl_built() -> int:
    """NCCL's version code; 0, because this version moves CPU tensors only."""
    return 0


def cuda_built() -> bool:
    """False: this version moves CPU tensors only."""
    return False


def rocm_built() -> bool:
    """False: this version moves CPU tensors only."""
    return False


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False
