"""`allreduce` in all its forms: alone and grouped, waiting and asynchronous, in place and not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine.engine import DType, ReduceOp
from sparkhvd.torch.arguments import check_compression, to_factor, to_list
from sparkhvd.torch.collectives import cuda_reductions
from sparkhvd.torch.collectives.cuda_adasum import start_adasum
from sparkhvd.torch.collectives.groups import start_group
from sparkhvd.torch.collectives.handles import Handle, Operation
from sparkhvd.torch.collectives.tensors import (
    Reduction,
    as_sent,
    check_linear,
    engine_dtype,
    gradient_name,
    lend,
    require_contiguous,
    resolve_op,
    view,
    wants_gradient,
    written,
)
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def _start(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
) -> list[Operation]:
    """Submit contiguous tensors as one operation per element type; usually that is one."""

    def start(part: str, dtype: DType, indices: list[int], digest: tuple[int, ...]) -> Operation:
        if not inputs[indices[0]].is_cpu:
            given, made = [inputs[i] for i in indices], [outputs[i] for i in indices]
            return _start_on_gpu(ctx, part, given, made, reduction, digest)
        views = [view(inputs[i], outputs[i]) for i in indices]
        call = ctx.engine.prepare_allreduce(views, dtype, *reduction, digest)
        return ctx.engine.start(call, part, lend(*inputs, *outputs))

    return start_group(name, inputs, start, reduction)


def _start_on_gpu(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
    digest: tuple[int, ...] = (),
) -> Operation:
    by = start_adasum if reduction.op is ReduceOp.ADASUM else cuda_reductions.start_allreduce
    return by(ctx, name, inputs, outputs, reduction, digest)


def _run_one(
    source: Tensor,
    target: Tensor | None,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Tensor:
    """Reduce one tensor and wait: the path whose time users see. `target` None makes a new tensor."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("allreduce", name, number)
    if type(prescale) is not float:  # nearly always it is, and calls cost time
        prescale = to_factor(name, "prescale_factor", prescale)
    if type(postscale) is not float:
        postscale = to_factor(name, "postscale_factor", postscale)
    dtype = engine_dtype(name, source)
    keep: object
    if target is not None:
        require_contiguous(name, target)
        keep = target.untyped_storage()  # as `lend`
    else:
        source = as_sent(source)
        target = torch.empty_like(source)
        keep = (source, target)  # nobody else has these
    if not source.is_cpu:
        reduction = Reduction(op, prescale, postscale, number)
        _start_on_gpu(ctx, name, [source], [target], reduction).wait()
        return target
    views = (view(source, target),)
    call = ctx.engine.prepare_allreduce(views, dtype, op, prescale, postscale, number)
    ctx.engine.run(call, name, keep)
    return target


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce`; `synchronize` gives a new tensor. No gradient flows through it."""
    op = resolve_op(average, op)
    return start_allreduce([tensor], name, op, prescale_factor, postscale_factor, process_set, True)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce` that writes its result into `tensor`, which must be contiguous."""
    op = resolve_op(average, op)
    return _start_in_place([tensor], name, op, prescale_factor, postscale_factor, process_set, True)


def start_allreduce(
    tensors: Iterable[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    """Submit tensors as one operation per element type; the handle gives one new tensor or a list."""
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("allreduce" if single else "grouped_allreduce", name, number)
    tensors = to_list(name, tensors)
    prescale = to_factor(name, "prescale_factor", prescale)
    postscale = to_factor(name, "postscale_factor", postscale)
    for tensor in tensors:
        engine_dtype(name, tensor)
    inputs = [as_sent(tensor) for tensor in tensors]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    works = _start(ctx, name, inputs, outputs, Reduction(op, prescale, postscale, number))
    return Handle(name, works, outputs[0] if single else outputs)


def _start_in_place(
    tensors: Iterable[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    ctx = context()
    number = set_id(process_set)
    name = ctx.name("allreduce" if single else "grouped_allreduce", name, number)
    own = to_list(name, tensors)
    prescale = to_factor(name, "prescale_factor", prescale)
    postscale = to_factor(name, "postscale_factor", postscale)
    for tensor in own:
        engine_dtype(name, tensor)
        require_contiguous(name, tensor)
    works = _start(ctx, name, own, own, Reduction(op, prescale, postscale, number))
    return Handle(name, works, own[0] if single else own, changed=own)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine `tensor` over all ranks and return the result; every rank gets the same values.

    Every rank must call this with the same name, shape and dtype, in any order among named operations;
    calls without a name must come in the same order on every rank. Gradients flow back through the same
    reduction with the same factors (Average and Sum only).

    Args:
        tensor: any shape, not modified. Every integer type, float16, bfloat16 (both summed in float32),
            float32, float64, bool (Sum and Max are "or", Product and Min are "and").
        average: deprecated; give `op`.
        name: matches calls across ranks; unique among operations in flight.
        compression: sends floating tensors in 16 bits.
        op: Average (the default), Sum, Min, Max, Product or Adasum (floating types, 1, 2, 4, ... ranks; tensors on a
            GPU are copied to the host for it and back).
            Average is the sum divided by the number of ranks and rounded once, so equal tensors whose sum is exact
            average to themselves. Averages of integers are divided in double and truncated.
        prescale_factor: factor of every rank's tensor, before it is combined.
        postscale_factor: factor of the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: the tensor or an argument is not supported.
        MismatchError: ranks disagree on shape, dtype or op; raised on every rank.
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank is gone. The engine is unusable until it is initialised again.
    """
    op = resolve_op(average, op)
    if compression is NoneCompressor and not wants_gradient(tensor):
        return _run_one(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(
        [tensor], name, compression, op, prescale_factor, postscale_factor, process_set, True
    )[0]


def _allreduce(
    tensors: Iterable[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> list[Tensor]:
    what = "allreduce" if single else "grouped_allreduce"
    check_compression(what, compression)
    compressed = [compression.compress(tensor) for tensor in to_list(what, tensors)]
    wires = [wire for wire, _ in compressed]
    if any(wants_gradient(wire) for wire in wires):
        reduced: Sequence[Tensor] = GroupedAllreduce.apply(  # type: ignore[no-untyped-call]  # torch's
            name, op, prescale, postscale, process_set, single, *wires
        )
    else:
        result = start_allreduce(wires, name, op, prescale, postscale, process_set, single).wait()
        reduced = [result] if single else result
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` into `tensor` itself, which must be contiguous; no gradient."""
    op = resolve_op(average, op)
    _run_one(tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)
    written((tensor,))
    return tensor


def grouped_allreduce_async(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce`; `synchronize` gives the list of results."""
    op = resolve_op(average, op)
    return start_allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_allreduce_async_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce` into the tensors themselves, which must be contiguous."""
    op = resolve_op(average, op)
    return _start_in_place(tensors, name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_allreduce(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation (one per dtype), without copying them together; all or none."""
    op = resolve_op(average, op)
    return _allreduce(
        tensors, name, compression, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_allreduce_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` into the tensors themselves, which must be contiguous; no gradient."""
    op = resolve_op(average, op)
    handle = _start_in_place(
        tensors, name, op, prescale_factor, postscale_factor, process_set, False
    )
    result: list[Tensor] = handle.wait()
    return result


class GroupedAllreduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the ranks' gradients, with the same factors."""

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
        what = "allreduce" if single else "grouped_allreduce"
        prescale = to_factor(what, "prescale_factor", prescale)
        postscale = to_factor(what, "postscale_factor", postscale)
        ctx.arguments = (gradient_name(name), op, prescale, postscale, process_set, single)
        handle = start_allreduce(tensors, name, op, prescale, postscale, process_set, single)
        result = handle.wait()
        return (result,) if single else tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        name, op, prescale, postscale, process_set, single = ctx.arguments
        check_linear("allreduce", op)
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
