"""`allgather`, single and grouped: every rank's rows, on every rank."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.engine.work import Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_list
from sparkhvd.torch.collectives.allreduces import allreduce, grouped_allreduce
from sparkhvd.torch.collectives.cuda import DeviceGather, start_device_allgather
from sparkhvd.torch.collectives.tensors import (
    Handle,
    Operation,
    Saved,
    as_sent,
    engine_dtype,
    gradient_name,
    start_group,
    view,
    wants_gradient,
)
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, members, set_id

# Results up to this size are copied: a copy of 16 KiB costs less than keeping the operation alive.
COPIED_BYTES = 16 << 10

# For each tensor of an operation: the concatenated tensor, and the number of rows from each rank.
Gathered = list[tuple[Tensor, tuple[int, ...]]]


def start_allgather(ctx: Context, name: str, tensor: Tensor, process_set: int = 0) -> Work:
    """Submit a tensor on the CPU, of at least one dimension."""
    return _start_one_type(ctx, name, [tensor], process_set)


def gathered(work: Work, dtype: torch.dtype, shape: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
    """Unpack a finished operation on a tensor like `shape`, and every rank's number of rows."""
    return unpack(work, dtype, [shape])[0]


def unpack(work: Work, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Gathered:
    """Unpack a finished allgather or alltoall of tensors like `shapes`, tensor after tensor."""
    output = work.output()
    members = len(output.rows) // len(shapes)
    parts: Gathered = []
    first = 0
    # The engine allocated this memory, and frees it with the work. So the tensors' storages keep the buffer alive,
    # and the buffer keeps the work alive. An empty result has the address 0, which is never read.
    buffer = (ctypes.c_char * output.num_bytes).from_address(output.address)
    buffer.work = work  # type: ignore[attr-defined]  # arrays of ctypes accept new attributes
    for index, shape in enumerate(shapes):
        rows = output.rows[index * members : (index + 1) * members]
        full = torch.Size((sum(rows), *shape[1:]))
        count = full.numel()
        if count == 0:
            part = torch.empty(full, dtype=dtype)
        else:
            offset = first * dtype.itemsize
            part = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(full)
        parts.append((part.clone() if output.num_bytes <= COPIED_BYTES else part, rows))
        first += count
    return parts


def _check(name: str, tensor: Tensor) -> None:
    engine_dtype(name, tensor)
    if tensor.dim() == 0:
        raise InvalidArgumentError(
            f"{name}: a tensor without dimensions cannot be concatenated. Give tensor.reshape(1)."
        )


def _start_one_type(
    ctx: Context,
    name: str,
    tensors: Sequence[Tensor],
    process_set: int,
    digest: tuple[int, ...] = (),
) -> Work:
    for tensor in tensors:
        _check(name, tensor)
    sources = [as_sent(tensor) for tensor in tensors]
    views = [view(source, None) for source in sources]
    dtype = engine_dtype(name, sources[0])
    return ctx.engine.start(
        ctx.engine.prepare(
            Collective.ALLGATHER, views, dtype, process_set=process_set, numbers=digest
        ),
        name,
        sources,
    )


def start_single_allgather(
    tensor: Tensor, name: str | None, process_set: ProcessSet, *, is_awaited: bool = False
) -> tuple[Handle[Tensor], list[int]]:
    """Submit one tensor. After the handle's wait the list has each rank's number of rows.

    `is_awaited` means that the caller waits at once.
    """
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("allgather", name, number)
    rows: list[int] = []
    work: Work | DeviceGather
    if isinstance(tensor, Tensor) and not tensor.is_cpu:
        _check(name, tensor)
        work = start_device_allgather(ctx, name, [tensor], number, is_awaited=is_awaited)
    else:
        work = start_allgather(ctx, name, tensor, number)
    dtype, shape = tensor.dtype, tensor.shape

    def finish() -> Tensor:
        joined, counts = joined_by(work, dtype, [shape])[0]
        rows.extend(counts)
        return joined

    return Handle(name, (work,), finish), rows


def joined_by(work: Operation, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Gathered:
    """Unpack a finished allgather on CPU or GPU. See `unpack`."""
    if isinstance(work, DeviceGather):
        return work.outcome()
    assert isinstance(work, Work)
    return unpack(work, dtype, shapes)


def start_grouped_allgather(
    tensors: Iterable[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    is_awaited: bool = False,
) -> tuple[Handle[tuple[Tensor, ...]], list[tuple[int, ...]]]:
    """Start a grouped allgather. The list is filled with each tensor's row counts after wait()."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("grouped_allgather", name, number)
    tensors = to_list(name, tensors)
    for tensor in tensors:
        _check(name, tensor)
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    rows: list[tuple[int, ...]] = [()] * len(kinds)
    parts: list[list[int]] = []

    def start(part: str, dtype: DType, indices: list[int], digest: tuple[int, ...]) -> Operation:
        parts.append(indices)
        members = [tensors[i] for i in indices]
        if members[0].is_cpu:
            return _start_one_type(ctx, part, members, number, digest)
        return start_device_allgather(ctx, part, members, number, digest, is_awaited=is_awaited)

    works = start_group(name, tensors, start, first_dimensions_differ=True)

    def finish() -> tuple[Tensor, ...]:
        joined: list[Tensor] = [torch.empty(0)] * len(kinds)
        for work, indices in zip(works, parts, strict=True):
            dtype, shapes = kinds[indices[0]][0], [kinds[index][1] for index in indices]
            for index, (tensor, counts) in zip(
                indices, joined_by(work, dtype, shapes), strict=True
            ):
                joined[index], rows[index] = tensor, counts
        return tuple(joined)

    return Handle(name, works, finish), rows


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Start an `allgather` without a gradient. `synchronize` returns the concatenated tensor."""
    return start_single_allgather(tensor, name, process_set)[0]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate every rank's tensor along the first dimension, in the order of ranks.

    First dimensions may differ between ranks and may be 0; the other dimensions and the dtype may not. The gradient
    is Horovod's: this rank's rows of the *average* of the ranks' gradients.

    Args:
        tensor: at least one dimension, any supported dtype, not modified.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Returns:
        A new tensor; the same on every rank.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    if wants_gradient(tensor):
        joined: Tensor = Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]  # torch's
        return joined
    handle, _ = start_single_allgather(tensor, name, process_set, is_awaited=True)
    return handle.wait()


def grouped_allgather_async(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[tuple[Tensor, ...]]:
    """Start a `grouped_allgather` without a gradient. `synchronize` returns a tuple of tensors."""
    return start_grouped_allgather(tensors, name, process_set)[0]


def grouped_allgather(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Run `allgather` on several tensors as one operation per dtype. All succeed or all fail."""
    tensors = to_list("grouped_allgather", tensors)
    if any([wants_gradient(tensor) for tensor in tensors]):
        joined: tuple[Tensor, ...] = GroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return joined
    handle, _ = start_grouped_allgather(tensors, name, process_set, is_awaited=True)
    return handle.wait()


class _OwnRows(NamedTuple):
    """Arguments that `forward` saves for `backward`.

    Attributes:
        name: the name of the collective of the backward pass.
        process_set: the ranks that take part.
        rows: for each concatenated tensor the index of this rank's first row, and the number of its rows.
    """

    name: str | None
    process_set: ProcessSet
    rows: list[tuple[int, int]]


class Allgather(torch.autograd.Function):
    """`allgather` with a gradient: this rank's rows of the average of the ranks' gradients, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Saved[_OwnRows], tensor: Tensor, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        handle, rows = start_single_allgather(tensor, name, process_set, is_awaited=True)
        joined = handle.wait()
        place = members(process_set).index(context().engine.topology.rank)
        own = (sum(rows[:place]), rows[place])
        ctx.arguments = _OwnRows(gradient_name(name), process_set, [own])
        return joined

    @staticmethod
    def backward(  # noqa: D102
        ctx: Saved[_OwnRows], *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        name, process_set, ((first, rows),) = ctx.arguments
        average = allreduce(gradients[0], name=name, op=ReduceOp.AVERAGE, process_set=process_set)
        return average.narrow(0, first, rows), None, None


class GroupedAllgather(torch.autograd.Function):
    """`grouped_allgather` with the gradients of `Allgather`."""

    @staticmethod
    def forward(
        ctx: Saved[_OwnRows], name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle, rows = start_grouped_allgather(tensors, name, process_set, is_awaited=True)
        joined = handle.wait()
        place = members(process_set).index(context().engine.topology.rank)
        own = [(sum(counts[:place]), counts[place]) for counts in rows]
        ctx.arguments = _OwnRows(gradient_name(name), process_set, own)
        return joined

    @staticmethod
    def backward(  # noqa: D102
        ctx: Saved[_OwnRows], *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        name, process_set, own = ctx.arguments
        averages = grouped_allreduce(
            gradients, name=name, op=ReduceOp.AVERAGE, process_set=process_set
        )
        parts = [average.narrow(0, *place) for average, place in zip(averages, own, strict=True)]
        return None, None, *parts
