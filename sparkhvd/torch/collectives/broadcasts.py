"""`broadcast`: one rank sends its tensor to every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkhvd.engine.library import Collective, ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integer
from sparkhvd.torch.collectives import cuda
from sparkhvd.torch.collectives.allreduces import allreduce
from sparkhvd.torch.collectives.tensors import (
    Handle,
    Operation,
    Saved,
    as_sent,
    engine_dtype,
    gradient_name,
    lend,
    require_contiguous,
    view,
    wants_gradient,
    written,
)
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id


def _root(ctx: Context, name: str, root_rank: int) -> int:
    size = ctx.engine.topology.size
    root = to_integer(root_rank)
    if root is None or not 0 <= root < size:
        raise InvalidArgumentError(
            f"{name}: root_rank is {root_rank!r}; with {size} ranks it must be from 0 to {size - 1}."
        )
    return root


def start_broadcast(
    ctx: Context, name: str, source: Tensor, target: Tensor, root_rank: int, process_set: int = 0
) -> Operation:
    """Submit contiguous tensors. `target` may be `source`."""
    dtype, root = engine_dtype(name, source), _root(ctx, name, root_rank)
    if not source.is_cpu:
        return cuda.start_broadcast(ctx, name, source, target, root, dtype, process_set)
    call = ctx.engine.prepare(
        Collective.BROADCAST,
        [view(source, target)],
        dtype,
        process_set=process_set,
        root_rank=root,
    )
    return ctx.engine.start(call, name, lend(source, target))


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Start a `broadcast` without a gradient. `synchronize` returns a new tensor."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("broadcast", name, number)
    engine_dtype(name, tensor)
    source = as_sent(tensor)
    target = torch.empty_like(source)
    work = start_broadcast(ctx, name, source, target, root_rank, number)
    return Handle(name, (work,), lambda: target)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Start a `broadcast` in place. The tensor must be contiguous."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("broadcast", name, number)
    engine_dtype(name, tensor)
    require_contiguous(name, tensor)
    work = start_broadcast(ctx, name, tensor, tensor, root_rank, number)
    return Handle(name, (work,), lambda: tensor, changed=(tensor,))


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Send rank `root_rank`'s tensor to every rank.

    Args:
        tensor: same shape and dtype on every rank, not modified.
        root_rank: the global rank with the values.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Returns:
        A new tensor. The gradient is Horovod's: the *average* of the ranks' gradients on `root_rank`, zero
        on the others.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    if wants_gradient(tensor):
        sent: Tensor = Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]  # torch's
        return sent
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Run `broadcast` in place, without a gradient. The tensor must be contiguous."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("broadcast", name, number)
    dtype = engine_dtype(name, tensor)
    require_contiguous(name, tensor)
    if tensor.is_cpu:
        root = _root(ctx, name, root_rank)
        call = ctx.engine.prepare(
            Collective.BROADCAST,
            [view(tensor, tensor)],
            dtype,
            process_set=number,
            root_rank=root,
        )
        ctx.engine.run(call, name, lend(tensor))
    else:
        start_broadcast(ctx, name, tensor, tensor, root_rank, number).wait()
    written((tensor,))
    return tensor


class Broadcast(torch.autograd.Function):
    """`broadcast` with Horovod's gradient: the average of the ranks' gradients on the root, zero elsewhere."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Saved[tuple[str | None, ProcessSet, int]],
        tensor: Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.arguments = (gradient_name(name), process_set, root_rank)
        return broadcast_async(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(  # noqa: D102
        ctx: Saved[tuple[str | None, ProcessSet, int]], *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        name, process_set, root_rank = ctx.arguments
        average = allreduce(gradients[0], name=name, op=ReduceOp.AVERAGE, process_set=process_set)
        if context().engine.topology.rank != root_rank:
            average = torch.zeros_like(average)
        return average, None, None, None
