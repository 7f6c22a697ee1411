"""The collectives as autograd functions, with Horovod's gradients.

A backward pass is a collective too: every rank that ran the forward one must run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch._context import context
from sparkhvd.torch.arguments import to_factor
from sparkhvd.torch.collectives.allgathers import (
    grouped_allgather,
    start_grouped_allgather,
    start_single_allgather,
)
from sparkhvd.torch.collectives.allreduces import (
    allreduce,
    grouped_allreduce,
    start_allreduce,
)
from sparkhvd.torch.collectives.alltoalls import alltoall, start_alltoall
from sparkhvd.torch.collectives.broadcasts import broadcast_async
from sparkhvd.torch.collectives.reducescatters import start_reducescatter
from sparkhvd.torch.process_sets import ProcessSet, members

__all__ = [
    "Allgather",
    "Alltoall",
    "Broadcast",
    "GroupedAllgather",
    "GroupedAllreduce",
    "GroupedReducescatter",
]


def _gradient_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_linear(what: str, op: ReduceOp) -> None:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{what}(op={op.name.title()}) has no gradient. Use Average or Sum, or detach the tensor."
        )


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
        what = "allreduce" if single else "grouped_allreduce"
        prescale = to_factor(what, "prescale_factor", prescale)
        postscale = to_factor(what, "postscale_factor", postscale)
        ctx.arguments = (_gradient_name(name), op, prescale, postscale, process_set, single)
        handle = start_allreduce(tensors, name, op, prescale, postscale, process_set, single)
        result = handle.wait()
        return (result,) if single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, op, prescale, postscale, process_set, single = ctx.arguments
        _check_linear("allreduce", op)
        # Not `start_allreduce`: with create_graph=True the gradient has a gradient too.
        arguments = {
            "name": name,
            "op": op,
            "prescale_factor": prescale,
            "postscale_factor": postscale,
            "process_set": process_set,
        }
        if single:
            reduced = [allreduce(gradients[0], **arguments)]
        else:
            reduced = grouped_allreduce(gradients, **arguments)
        return (None, None, None, None, None, None, *reduced)


class Allgather(torch.autograd.Function):
    """The gradient is the average of the ranks' gradients, cut to this rank's rows (as in Horovod)."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        handle, rows = start_single_allgather(tensor, name, process_set, is_awaited=True)
        joined: Tensor = handle.wait()
        place = members(process_set).index(context().engine.topology.rank)
        ctx.arguments = (_gradient_name(name), process_set, sum(rows[:place]), rows[place])
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, process_set, first, rows = ctx.arguments
        average = allreduce(gradients[0], name=name, op=ReduceOp.AVERAGE, process_set=process_set)
        return average.narrow(0, first, rows), None, None


class GroupedAllgather(torch.autograd.Function):
    """As `Allgather`, for several tensors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle, rows = start_grouped_allgather(tensors, name, process_set, is_awaited=True)
        joined: tuple[Tensor, ...] = handle.wait()
        place = members(process_set).index(context().engine.topology.rank)
        own = [(sum(counts[:place]), counts[place]) for counts in rows]
        ctx.arguments = (_gradient_name(name), process_set, own)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, process_set, own = ctx.arguments
        averages = grouped_allreduce(
            gradients, name=name, op=ReduceOp.AVERAGE, process_set=process_set
        )
        parts = [average.narrow(0, *place) for average, place in zip(averages, own, strict=True)]
        return None, None, *parts


class Alltoall(torch.autograd.Function):
    """The gradient of rows goes back to where they came from."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        output: Tensor
        received: Tensor
        output, received = start_alltoall(tensor, splits, name, process_set, is_awaited=True).wait()
        ctx.arguments = (_gradient_name(name), process_set, received, tensor.shape[0])
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, process_set, received, rows = ctx.arguments
        gradient, _ = alltoall(gradients[0], received, name, process_set)
        unsent = rows - gradient.shape[0]  # rows behind the last split
        if unsent > 0:
            gradient = torch.cat([gradient, gradient.new_zeros(unsent, *gradient.shape[1:])])
        return gradient, None, None, None


class GroupedReducescatter(torch.autograd.Function):
    """The gradient is the ranks' gradients joined, with the same factors; with Sum times their number."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        single: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        what = "reducescatter" if single else "grouped_reducescatter"
        prescale = to_factor(what, "prescale_factor", prescale)
        postscale = to_factor(what, "postscale_factor", postscale)
        ctx.arguments = (_gradient_name(name), op, prescale * postscale, process_set)
        handle = start_reducescatter(tensors, name, op, prescale, postscale, process_set, single)
        result = handle.wait()
        return (result,) if single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, op, factor, process_set = ctx.arguments
        _check_linear("reducescatter", op)
        if op is ReduceOp.SUM:
            factor *= process_set.size()
        scaled = [gradient * factor if factor != 1 else gradient for gradient in gradients]
        joined = grouped_allgather(scaled, name=name, process_set=process_set)
        return None, None, None, None, None, None, *joined


class Broadcast(torch.autograd.Function):
    """The gradient is the average of the ranks' gradients on the root, zero elsewhere (as in Horovod)."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.arguments = (_gradient_name(name), process_set, root_rank)
        result: Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, process_set, root_rank = ctx.arguments
        average = allreduce(gradients[0], name=name, op=ReduceOp.AVERAGE, process_set=process_set)
        if context().engine.topology.rank != root_rank:
            average = torch.zeros_like(average)
        return average, None, None, None
