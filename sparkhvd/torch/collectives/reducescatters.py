"""`reducescatter`: the reduced tensor, of which every rank gets its rows; alone and grouped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine.engine import DType, ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import check_compression, to_factor, to_list
from sparkhvd.torch.collectives import cuda_reductions
from sparkhvd.torch.collectives.allgathers import grouped_allgather
from sparkhvd.torch.collectives.groups import start_group
from sparkhvd.torch.collectives.handles import Handle, Operation
from sparkhvd.torch.collectives.tensors import (
    Average,
    Reduction,
    as_sent,
    check_linear,
    engine_dtype,
    gradient_name,
    resolve_op,
    view,
    wants_gradient,
)
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.context import context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, members, set_id

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def own_rows(rows: int, size: int, rank: int) -> int:
    """How many of `rows` rank `rank` of `size` gets: the first ones get one more."""
    return rows // size + (rank < rows % size)


def start_reducescatter(
    tensors: Iterable[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    """Submit tensors as one operation per element type; the handle gives one tensor or a list."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("reducescatter" if single else "grouped_reducescatter", name, number)
    tensors = to_list(name, tensors)
    prescale = to_factor(name, "prescale_factor", prescale)
    postscale = to_factor(name, "postscale_factor", postscale)
    ranks = members(process_set)
    mine = ctx.engine.topology.rank
    place = ranks.index(mine) if mine in ranks else len(ranks)  # no member: the engine says so
    for tensor in tensors:
        engine_dtype(name, tensor)
        if tensor.dim() == 0:
            raise InvalidArgumentError(
                f"{name}: Reducescatter does not support scalar inputs: it divides the first dimension. "
                "Use allreduce."
            )
    inputs = [as_sent(tensor) for tensor in tensors]
    outputs = [x.new_empty((own_rows(x.shape[0], len(ranks), place), *x.shape[1:])) for x in inputs]

    reduction = Reduction(op, prescale, postscale, number)

    def start(part: str, dtype: DType, indices: list[int], digest: tuple[int, ...]) -> Operation:
        if not inputs[indices[0]].is_cpu:
            given, made = [inputs[i] for i in indices], [outputs[i] for i in indices]
            return cuda_reductions.start_reducescatter(ctx, part, given, made, reduction, digest)
        views = [view(inputs[i], outputs[i]) for i in indices]
        call = ctx.engine.prepare_reducescatter(views, dtype, *reduction, digest)
        return ctx.engine.start(call, part, (inputs, outputs))

    works = start_group(name, inputs, start, reduction)
    return Handle(name, works, outputs[0] if single else outputs)


def _reducescatter(
    tensors: Iterable[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> list[Tensor]:
    what = "reducescatter" if single else "grouped_reducescatter"
    check_compression(what, compression)
    compressed = [compression.compress(tensor) for tensor in to_list(what, tensors)]
    wires = [wire for wire, _ in compressed]
    if any([wants_gradient(wire) for wire in wires]):
        reduced: Sequence[Tensor] = GroupedReducescatter.apply(  # type: ignore[no-untyped-call]  # torch's
            name, op, prescale, postscale, process_set, single, *wires
        )
    else:
        result: Any = start_reducescatter(
            wires, name, op, prescale, postscale, process_set, single
        ).wait()
        reduced = [result] if single else result
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`; `synchronize` gives this rank's rows. No gradient flows through it."""
    op = resolve_op(None, op)
    return start_reducescatter(
        [tensor], name, op, prescale_factor, postscale_factor, process_set, True
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine `tensor` over all ranks and return this rank's rows of the result.

    Of d rows each of n ranks gets d // n, and the first d % n ranks one more; a rank may get none. The gradient
    is Horovod's: the ranks' gradients joined, with the same factors, and with Sum times the number of ranks.

    Args:
        tensor: at least one dimension, same shape and dtype on every rank, not modified; dtypes as for
            `allreduce`.
        name: as for `allreduce`.
        compression: as for `allreduce`.
        op: Average (the default), Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: factor of every rank's tensor, before it is combined.
        postscale_factor: factor of the result.

    Returns:
        A new tensor with this rank's rows.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    op = resolve_op(None, op)
    return _reducescatter(
        [tensor], name, compression, op, prescale_factor, postscale_factor, process_set, True
    )[0]


def grouped_reducescatter_async(
    tensors: Iterable[Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`; `synchronize` gives the list of this rank's rows. No gradient."""
    op = resolve_op(None, op)
    return start_reducescatter(
        tensors, name, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_reducescatter(
    tensors: Iterable[Tensor],
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation (one per dtype); all of them or none."""
    op = resolve_op(None, op)
    return _reducescatter(
        tensors, name, compression, op, prescale_factor, postscale_factor, process_set, False
    )


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
        ctx.arguments = (gradient_name(name), op, prescale * postscale, process_set)
        handle = start_reducescatter(tensors, name, op, prescale, postscale, process_set, single)
        result = handle.wait()
        return (result,) if single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, op, factor, process_set = ctx.arguments
        check_linear("reducescatter", op)
        if op is ReduceOp.SUM:
            factor *= process_set.size()
        scaled = [gradient * factor if factor != 1 else gradient for gradient in gradients]
        joined = grouped_allgather(scaled, name=name, process_set=process_set)
        return None, None, None, None, None, None, *joined
