"""Horovod's API on sparkhvd's engine: `import sparkhvd.torch as hvd`.

A Horovod script changes only this import. Call `init()` first; under `sparkhvd.runner.run` and `TorchEstimator` it joins the ranks of
the job, elsewhere it creates a job of one rank.

Threads: any thread of a program may call the API. All threads share one engine per process (`context`). Hooks of
`DistributedOptimizer` run on autograd's threads.

Failure: an operation that ranks call differently is a `MismatchError` on all of them, and the engine stays usable. After the loss of a
rank every operation raises a `CollectiveError` until `shutdown()`.

Shutdown: `shutdown()`, or the end of the process. Tensors in registered memory outlive it.

Each module imports only those above it:

    arguments          users' arguments, converted
    compressors        16-bit floats on the wire
    context            the engine that `rank()` and `allreduce()` use
    cuda               streams, events and memory of CUDA; NCCL
    process_sets       the ranks that take part in an operation
    startup            ways to join the job, chosen by `init(comm=...)`
    collectives        allreduce, allgather and the other collectives
    broadcast          parameters, optimizer state and objects
    communicator_sets  process sets from MPI communicators
    registered         tensors in registered memory
    sync_batch_norm    `SyncBatchNorm`
    functions          names of Horovod's `functions` module
    gradients          reduction of gradients in buckets
    compression        `Compression`
    optimizer          `DistributedOptimizer`
    elastic            elastic training
    mpi_ops            names of Horovod's `mpi_ops` module
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Sequence

import torch

from sparkhvd.elastic import ElasticRendezvous
from sparkhvd.engine.counters import Metrics
from sparkhvd.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    HorovodInternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from sparkhvd.launchers import environment
from sparkhvd.launchers.mpi import Communicator, is_communicator
from sparkhvd.observe import timeline
from sparkhvd.rank_messages import log_to_driver
from sparkhvd.torch import collectives, context, elastic, startup
from sparkhvd.torch.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sparkhvd.torch.collectives import *  # noqa: F403 - its `__all__` is the list of public collectives
from sparkhvd.torch.communicator_sets import add_process_set, remove_process_set
from sparkhvd.torch.compression import Compression
from sparkhvd.torch.cuda import nccl_version
from sparkhvd.torch.optimizer import DistributedOptimizer
from sparkhvd.torch.process_sets import ProcessSet, global_process_set
from sparkhvd.torch.registered import registered_empty
from sparkhvd.torch.startup import Comm
from sparkhvd.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *collectives.__all__,
    "CollectiveError",
    "CollectiveTimeoutError",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "SyncBatchNorm",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "elastic",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "log_to_driver",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "registered_empty",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(
    comm: Comm | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int] | Communicator] | str | None = None,
) -> None:
    """Join the job. Every rank must call this.

    It does nothing while this process is initialised, and works again after `shutdown()`. The GPU that
    `sparkhvd.runner.run` assigned to this rank becomes torch's current device, unless the script selected another.

    Args:
        comm: the ranks, and how they find each other. None means the job of this process's launcher, or a job of one rank
            without a launcher. A list names ranks of that job, which become a separate job, numbered by their positions in
            it. A communicator of mpi4py (or an object with its Get_rank, Get_size and allgather) makes a job of its
            processes, with its ranks. All its processes must call this. Each of several communicators makes an
            independent job, and MPI is not used later. A `Rendezvous` connects the ranks itself.
        process_sets: sets to register at once, the same on every rank. Horovod's "dynamic" has no effect: sets
            may always be added and removed. In an elastic job the sets whose ranks are all present are registered again
            whenever the ranks change, and a process that is new in a running job then joins the other ranks here
            instead of in `hvd.elastic.run`.

    Raises:
        InvalidArgumentError: an argument is wrong; or this process has joined a job of another size or with another rank than
            `comm` has, or MPI's world differs from the launcher's ranks.
        PreflightError: a rank cannot take part, or did not use the communicator within `Settings.start_timeout_s`.
        CollectiveTimeoutError: a rank did not connect within `Settings.connect_timeout_s`; the message names it.
        PeerLostError: a rank's process ended before it connected.
        EngineUnavailableError: the compiled library is missing.
    """
    sets = _sets(process_sets)
    if not context.initialize(startup.way_to_join(comm), may_join_later=not sets):
        startup.check_joined(comm, context.context().comm)
        return
    if rank() == 0:
        _tell_choices()
    context.context().again = functools.partial(init, comm, sets)
    context.context().comm = comm
    try:
        for process_set in sets:
            if _exists(process_set):
                add_process_set(process_set)
        startup.make_current()
    except BaseException:
        shutdown()
        raise


@functools.cache  # to print it once per process
def _tell_choices() -> None:
    if note := environment.note_of():
        sys.stderr.write(f"{note}\n")


def _exists(process_set: ProcessSet | Sequence[int] | Communicator) -> bool:
    """Check whether `init` can register the set now.

    In an elastic job it cannot register a set of all ranks or a set with missing ranks.
    """
    is_elastic = isinstance(context.context().rendezvous, ElasticRendezvous)
    if not is_elastic or is_communicator(process_set):
        return True
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    return max(made.ranks or [0]) < size() and len(made.ranks or []) != size()


def _sets(
    process_sets: Iterable[ProcessSet | Sequence[int] | Communicator] | str | None,
) -> list[ProcessSet | Sequence[int] | Communicator]:
    """Convert the argument `process_sets` of `init` to a list."""
    if process_sets is None or (isinstance(process_sets, str) and process_sets == "dynamic"):
        return []
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
        raise InvalidArgumentError(
            f"init(process_sets={process_sets!r}): give a list of process sets, 'dynamic' or None."
        )
    return list(process_sets)


def shutdown() -> None:
    """Leave the job. This is called automatically at exit.

    Operations in flight fail here and on the other ranks.
    """
    context.shut_down()


def is_initialized() -> bool:
    """True between `init()` and `shutdown()`."""
    return context.is_initialized()


def rank() -> int:
    """This process's number, from 0 to `size() - 1`."""
    return context.context().place.rank


def size() -> int:
    """The number of ranks."""
    return context.context().place.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return context.context().place.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return context.context().place.local_size


def cross_rank() -> int:
    """This host's number among the hosts with a rank of the same `local_rank()`."""
    return context.context().place.cross_rank


def cross_size() -> int:
    """The number of hosts with a rank of the same `local_rank()`."""
    return context.context().place.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return context.context().place.is_homogeneous


def metrics(*, show: bool = True) -> Metrics:
    """Counters of this rank's engine since `init()`: operations, bytes, times, waits (docs/monitoring.md).

    Args:
        show: print the table. `str()` of the result is the table, `.prometheus()` the text for Prometheus,
            `.counters` the numbers.
    """
    counted = Metrics(context.context().engine.counters())
    if show:
        sys.stdout.write(f"{counted}\n")
    return counted


def start_timeline(
    file_path: str | os.PathLike[str], mark_cycles: bool = False, all_ranks: bool = False
) -> None:
    """Start to record a timeline for ui.perfetto.dev. A running timeline ends first.

    Args:
        file_path: a file on rank 0, created or overwritten; valid JSON at any moment except in the middle of a write.
        mark_cycles: also mark when a thread begins to drive the engine.
        all_ranks: every rank records, and `stop_timeline()` merges all records into rank 0's file, by rank 0's clock;
            every rank must then call both. Without it only rank 0 writes, and others may call this.

    Raises:
        InvalidArgumentError: the file cannot be written; with `all_ranks` raised on every rank.
    """
    if not isinstance(file_path, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"start_timeline({file_path!r}): expected a path, got {type(file_path).__name__}. Give the name of the "
            "file."
        )
    timeline.start(
        context.context().engine, file_path, mark_cycles=mark_cycles, all_ranks=all_ranks
    )


def stop_timeline() -> None:
    """End a running timeline and wait until its file is complete."""
    timeline.stop(context.context().engine)


def mpi_built() -> bool:
    """Always False: sparkhvd has its own transport."""
    return False


def mpi_enabled() -> bool:
    """Always False: sparkhvd has its own transport."""
    return False


def mpi_threads_supported() -> bool:
    """True in a process started by MPI, because MPI calls and collectives mix in any order and thread.

    sparkhvd itself never calls MPI, so the two cannot wait for each other.
    """
    return environment.is_mpi()


def gloo_built() -> bool:
    """Always False: sparkhvd has its own transport."""
    return False


def gloo_enabled() -> bool:
    """Always False: sparkhvd has its own transport."""
    return False


def nccl_built() -> int:
    """NCCL's version code in this process's torch, or 0 without NCCL.

    GPU tensors are not supported without NCCL.
    """
    return nccl_version()


def cuda_built() -> bool:
    """Whether this process's torch supports NVIDIA GPUs. sparkhvd itself always does."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Always False: sparkhvd does not support AMD GPUs."""
    return False


def ddl_built() -> bool:
    """Always False: sparkhvd does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Always False: sparkhvd does not use Intel's oneCCL."""
    return False
