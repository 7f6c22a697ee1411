"""The collectives as autograd functions, with Horovod's gradients.

A backward pass is a collective too: every rank that ran the forward one must run it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch import collectives
from sparkhvd.torch._context import context
from sparkhvd.torch.process_sets import ProcessSet, set_id

__all__ = ["Allgather", "Broadcast", "GroupedAllreduce"]


def _gradient_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


class GroupedAllreduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the ranks' gradients, with the same factors."""

    @staticmethod
    def forward(  # noqa: D102 - what the class says
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        single: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = (_gradient_name(name), op, prescale, postscale, process_set, single)
        handle = collectives._allreduce_async(
            tensors, name, op, prescale, postscale, process_set, single
        )
        result = handle.wait()
        return (result,) if single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, op, prescale, postscale, process_set, single = ctx.arguments
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InvalidArgumentError(
                f"allreduce(op={op.name.title()}) has no gradient. Use Average or Sum, or detach the tensor."
            )
        handle = collectives._allreduce_async(
            gradients, name, op, prescale, postscale, process_set, single
        )
        result = handle.wait()
        return (None, None, None, None, None, None, *([result] if single else result))


class Allgather(torch.autograd.Function):
    """The gradient is the average of the ranks' gradients, cut to this rank's rows (as in Horovod)."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        current = context()
        set_id(process_set)
        full_name = current.name("allgather", name)
        work = collectives.start_allgather(current, full_name, tensor)
        work.wait()
        joined, rows = collectives.gathered(work, tensor.dtype, tensor.shape)
        rank = current.engine.topology.rank
        ctx.arguments = (_gradient_name(name), process_set, sum(rows[:rank]), rows[rank])
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, process_set, first, rows = ctx.arguments
        average = collectives.allreduce(
            gradients[0], name=name, op=ReduceOp.AVERAGE, process_set=process_set
        )
        return average.narrow(0, first, rows), None, None


class Broadcast(torch.autograd.Function):
    """The gradient is the average of the ranks' gradients on the root, zero elsewhere (as in Horovod)."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.arguments = (_gradient_name(name), process_set, root_rank)
        result: Tensor = collectives.broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, process_set, root_rank = ctx.arguments
        average = collectives.allreduce(
            gradients[0], name=name, op=ReduceOp.AVERAGE, process_set=process_set
        )
        if context().engine.topology.rank != root_rank:
            average = torch.zeros_like(average)
        return average, None, None, None
