"""`barrier` and `join`: ranks wait for each other."""

from __future__ import annotations

import torch

from sparkhvd.torch.context import Context, context
from sparkhvd.torch.cuda import RankGpu, open_device
from sparkhvd.torch.process_sets import ProcessSet, ProcessSets, global_process_set, set_id


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called this equally often."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("barrier", None, number)
    ctx.engine.barrier(name=name, process_set=number).wait()


def join(device: int = -1) -> int:
    """Announce that this rank has no more work, and wait until every rank has announced it.

    For uneven work: the allreduces (Sum, Average) of the working ranks, on all ranks and on every process set
    of this rank, count zeros for this rank; Average still divides by the set's size. Every other operation that they
    start meanwhile, and Min, Max, Product and Adasum, raises a `MismatchError` on all of them.
    This rank's tensors are neither read nor written.

    Args:
        device: this rank's GPU, if the others may reduce GPU tensors before this rank's first GPU tensor; -1 is torch's
            current device, if CUDA has been used, or no GPU.

    Returns:
        The rank that joined last, whose state is the newest.

    Raises:
        CollectiveTimeoutError, PeerLostError: as for `allreduce`; work of the others extends the wait.
    """
    ctx = context()
    _open_device(ctx, device)
    rank = ctx.engine.topology.rank
    sets = [
        each for each in list(ctx.part(ProcessSets).by_ranks.values()) if rank in (each.ranks or ())
    ]
    work = ctx.engine.join()
    # They last as long as the join of all ranks, which work outside of a set extends.
    others = [ctx.engine.join(process_set=set_id(each), timeout_s=0) for each in sets]
    work.wait()
    ctx.joins += 1
    # Now every rank has joined its sets too, and only their coordinators' answers are pending.
    for other in others:
        other.wait(ctx.engine.settings.stall_shutdown_s or None)
    return work.output().rows[0]


def _open_device(ctx: Context, device: int) -> None:
    """Open this rank's GPU for operations of other ranks: after `join` it takes part in them with zeros."""
    gpu = ctx.part(RankGpu)
    if gpu.device is not None:
        return
    if device < 0 and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    if device >= 0 and (gpu.opener is not None or torch.cuda.is_available()):
        open_device(ctx, device)
