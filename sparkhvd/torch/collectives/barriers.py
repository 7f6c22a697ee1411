"""`barrier` and `join`: ranks wait for each other."""

from __future__ import annotations

import torch

from sparkhvd.torch.context import Context, context
from sparkhvd.torch.cuda import RankGpu, open_device
from sparkhvd.torch.process_sets import ProcessSet, ProcessSets, global_process_set, set_id


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has reached the same call."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("barrier", None, number)
    ctx.engine.barrier(name=name, process_set=number).wait()


def join(device: int = -1) -> int:
    """Announce that this rank has no more work, and wait until every rank has announced it.

    For ranks with different numbers of batches. While this rank waits, it contributes zeros to the other ranks'
    allreduces with Sum or Average, on all ranks and on every process set of this rank; Average still divides by the
    set's size. Every other operation, and Min, Max, Product and Adasum, raises a `MismatchError` on the ranks that
    started it. This rank's tensors are neither read nor written.

    Args:
        device: this rank's GPU, for a rank that has not used a GPU tensor yet while other ranks may reduce GPU tensors;
            -1 means torch's current device if CUDA has been used, otherwise no GPU.

    Returns:
        The rank that joined last, whose state is the newest.

    Raises:
        CollectiveTimeoutError, PeerLostError: as for `allreduce`; operations of the other ranks extend the timeout.
    """
    ctx = context()
    _open_device(ctx, device)
    rank = ctx.engine.topology.rank
    sets = [
        each for each in list(ctx.part(ProcessSets).by_ranks.values()) if rank in (each.ranks or ())
    ]
    work = ctx.engine.join()
    # No timeout: a set's join lasts until all ranks of the job have joined, and ranks outside of the set still work.
    others = [ctx.engine.join(process_set=set_id(each), timeout_s=0) for each in sets]
    work.wait()
    ctx.joins += 1
    # Every rank has joined its process sets by now, so only the answers of the sets' coordinators are pending.
    for other in others:
        other.wait(ctx.engine.settings.stall_shutdown_s or None)
    return work.output().rows[0]


def _open_device(ctx: Context, device: int) -> None:
    """Open this rank's GPU, because a joined rank contributes zeros to other ranks' operations on GPUs."""
    gpu = ctx.part(RankGpu)
    if gpu.device is not None:
        return
    if device < 0 and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    if device >= 0 and (gpu.opener is not None or torch.cuda.is_available()):
        open_device(ctx, device)
