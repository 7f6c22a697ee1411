"""`alltoall`: every rank sends rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparkhvd.engine.library import Collective
from sparkhvd.engine.work import Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integers, to_list
from sparkhvd.torch.collectives.allgathers import gathered
from sparkhvd.torch.collectives.cuda import DeviceGather, start_device_alltoall
from sparkhvd.torch.collectives.tensors import (
    Handle,
    Saved,
    as_sent,
    engine_dtype,
    gradient_name,
    view,
    wants_gradient,
)
from sparkhvd.torch.context import context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

Splits = Tensor | Sequence[int]


def split_numbers(what: str, splits: Splits | None) -> list[int] | None:
    if splits is None:
        return None
    if not isinstance(splits, Tensor):
        items = to_list(what, splits, "splits")
        numbers = to_integers(items)
        if numbers is None:
            raise InvalidArgumentError(
                f"{what}: splits are {items!r}; they must be integers, one per rank of the process set."
            )
        return numbers
    if splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool:
        raise InvalidArgumentError(
            f"{what}: splits have dtype {splits.dtype}; they must be integers. Give torch.int32."
        )
    if splits.dim() != 1:
        raise InvalidArgumentError(
            f"{what}: splits have shape {tuple(splits.shape)}; they must have one dimension, with one number "
            "per rank of the process set."
        )
    return [int(rows) for rows in splits.tolist()]


def alltoall_async(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]:
    """Start an `alltoall` without a gradient. `synchronize` returns `(output, received_splits)`.

    The result has both parts also without `splits`.
    """
    return start_alltoall(tensor, splits, name, process_set)


def start_alltoall(
    tensor: Tensor,
    splits: Splits | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_awaited: bool = False,
) -> Handle[tuple[Tensor, Tensor]]:
    """Submit a tensor like `alltoall_async`. `is_awaited` means that the caller waits at once."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("alltoall", name, number)
    dtype = engine_dtype(name, tensor)
    numbers = split_numbers(name, splits)
    if numbers is not None and not numbers:
        raise InvalidArgumentError(
            f"{name}: 0 splits were given. Give one per rank of the process set, or None for equal parts."
        )
    kind, shape = tensor.dtype, tensor.shape
    work: Work | DeviceGather
    if tensor.is_cpu:
        source = as_sent(tensor)
        call = ctx.engine.prepare(
            Collective.ALLTOALL,
            [view(source, None)],
            dtype,
            process_set=number,
            numbers=tuple(numbers or ()),
        )
        work = ctx.engine.start(call, name, source)
    else:
        work = start_device_alltoall(ctx, name, tensor, numbers, number, is_awaited=is_awaited)

    def finish() -> tuple[Tensor, Tensor]:
        if isinstance(work, DeviceGather):
            output, rows = work.outcome()[0]
        else:
            output, rows = gathered(work, kind, shape)
        return output, torch.tensor(rows, dtype=torch.int32)

    return Handle(name, (work,), finish)


def alltoall(
    tensor: Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of `tensor` to every rank and concatenate the received rows, in rank order.

    The first dimensions may differ between ranks, the other dimensions and the dtype may not. Gradients return to
    the senders of the rows.

    Args:
        tensor: at least one dimension, any supported dtype, not modified; the first rows are for the first rank
            of the process set, and so on. Rows behind the last split are not sent.
        splits: rows for each rank of the process set: integers in one dimension. None sends equal parts, so the
            first dimension must be divisible.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Returns:
        The received rows; with `splits` also the numbers of rows received from each rank (int32).

    Raises:
        InvalidArgumentError: the splits do not fit the tensor or the process set; or as for `allreduce`.
        MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    output: Tensor
    received: Tensor
    if wants_gradient(tensor):
        output, received = Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]  # torch's
    else:
        output, received = start_alltoall(tensor, splits, name, process_set, is_awaited=True).wait()
    return output if splits is None else (output, received)


class _Sent(NamedTuple):
    """Arguments that `forward` saves for `backward`.

    Attributes:
        name: the name of the collective of the backward pass.
        process_set: the ranks that take part.
        received: number of rows received from each rank.
        rows: number of rows of the sent tensor.
    """

    name: str | None
    process_set: ProcessSet
    received: Tensor
    rows: int


class _Context(Saved[_Sent], Protocol):
    """The methods of autograd's context that `forward` uses."""

    def mark_non_differentiable(self, *args: Tensor) -> None:
        """Declare outputs without a gradient."""


class Alltoall(torch.autograd.Function):
    """`alltoall` with a gradient: each row's gradient returns to the sender of the row."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: _Context,
        tensor: Tensor,
        splits: Splits | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        output, received = start_alltoall(tensor, splits, name, process_set, is_awaited=True).wait()
        ctx.arguments = _Sent(gradient_name(name), process_set, received, tensor.shape[0])
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(  # noqa: D102
        ctx: _Context, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        name, process_set, received, rows = ctx.arguments
        gradient, _ = alltoall(gradients[0], received, name, process_set)
        unsent = rows - gradient.shape[0]  # rows behind the last split
        if unsent > 0:
            gradient = torch.cat([gradient, gradient.new_zeros(unsent, *gradient.shape[1:])])
        return gradient, None, None, None
