"""`allreduce` in all its forms: single and grouped, blocking and asynchronous, in place and into new tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.calls import Reduction
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.torch.arguments import check_compression, to_list
from sparkhvd.torch.collectives import cuda
from sparkhvd.torch.collectives.cuda import start_adasum
from sparkhvd.torch.collectives.tensors import (
    Handle,
    Operation,
    ReductionRequest,
    Saved,
    as_pairs,
    as_sent,
    check_linear,
    engine_dtype,
    lend,
    require_contiguous,
    resolve_op,
    start_group,
    to_request,
    view,
    wants_gradient,
    written,
)
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

# A constant, because the lookup of an enumeration's member would slow every call.
_ALLREDUCE = Collective.ALLREDUCE


def _operands(
    tensor: Tensor, request: ReductionRequest, *, in_place: bool
) -> tuple[Context, str, int, DType, Tensor, Tensor, object]:
    """Check one tensor and prepare its reduction. This is fast, because every operation does it.

    Returns:
        The context, the operation's name and process set, the element type, the tensors to read and to write, and the
        memory to keep for the engine.
    """
    ctx = context()
    number = set_id(request.process_set)
    name = ctx.name(request.kind, request.name, number)
    if isinstance(tensor, Tensor) and tensor.is_complex():
        tensor = as_pairs(name, tensor, request.reduction.op, in_place=in_place)
    dtype = engine_dtype(name, tensor)
    if in_place:
        require_contiguous(name, tensor)
        # `lend` explains why.
        return ctx, name, number, dtype, tensor, tensor, tensor.untyped_storage()
    source = as_sent(tensor)
    target = torch.empty_like(source)
    # The user has no access to these.
    return ctx, name, number, dtype, source, target, (source, target)


def _run_one(tensor: Tensor, request: ReductionRequest, *, in_place: bool) -> Tensor:
    """Reduce one tensor and wait."""
    ctx, name, number, dtype, source, target, keep = _operands(tensor, request, in_place=in_place)
    if not source.is_cpu:
        _start_on_gpu(ctx, name, (source,), (target,), request.reduction, number).wait()
    else:
        views = (view(source, target),)
        call = ctx.engine.prepare(_ALLREDUCE, views, dtype, request.reduction, number)
        ctx.engine.run(call, name, keep)
    return torch.view_as_complex(target) if tensor.is_complex() else target


def _one(tensor: Tensor, request: ReductionRequest, *, in_place: bool = False) -> Handle[Tensor]:
    """Start the reduction of one tensor."""
    ctx, name, number, dtype, source, target, keep = _operands(tensor, request, in_place=in_place)
    work: Operation
    if not source.is_cpu:
        work = _start_on_gpu(ctx, name, (source,), (target,), request.reduction, number)
    else:
        views = (view(source, target),)
        call = ctx.engine.prepare(_ALLREDUCE, views, dtype, request.reduction, number)
        work = ctx.engine.start(call, name, keep)
    if in_place:
        return Handle(name, (work,), lambda: tensor, (tensor,))
    return Handle(
        name, (work,), lambda: torch.view_as_complex(target) if tensor.is_complex() else target
    )


def _start(
    tensors: Iterable[Tensor], request: ReductionRequest, *, in_place: bool
) -> tuple[str, list[Operation], list[Tensor]]:
    """Submit tensors as one operation per element type.

    Returns:
        The name, the operations, and their output tensors: the caller's if `in_place`.
    """
    ctx = context()
    number = set_id(request.process_set)
    name = ctx.name(request.kind, request.name, number)
    reduction = request.reduction
    given = to_list(name, tensors)
    inputs = outputs = [as_pairs(name, each, reduction.op, in_place=in_place) for each in given]
    for tensor in inputs:
        engine_dtype(name, tensor)
        if in_place:
            require_contiguous(name, tensor)
    if not in_place:
        inputs = [as_sent(tensor) for tensor in inputs]
        outputs = [torch.empty_like(tensor) for tensor in inputs]

    def start(part: str, dtype: DType, indices: list[int], digest: tuple[int, ...]) -> Operation:
        if not inputs[indices[0]].is_cpu:
            ins, outs = [inputs[i] for i in indices], [outputs[i] for i in indices]
            return _start_on_gpu(ctx, part, ins, outs, reduction, number, digest)
        views = [view(inputs[i], outputs[i]) for i in indices]
        call = ctx.engine.prepare(_ALLREDUCE, views, dtype, reduction, number, numbers=digest)
        return ctx.engine.start(call, part, lend(*inputs, *outputs))

    started = start_group(name, inputs, start, reduction)
    if in_place:
        return name, started, given
    pairs = zip(given, outputs, strict=True)
    return name, started, [torch.view_as_complex(o) if x.is_complex() else o for x, o in pairs]


def _start_on_gpu(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: Reduction,
    process_set: int,
    digest: tuple[int, ...] = (),
) -> Operation:
    is_adasum = reduction.op is ReduceOp.ADASUM
    by = start_adasum if is_adasum else cuda.start_allreduce
    return by(ctx, name, inputs, outputs, reduction, process_set, digest)


def _group(
    tensors: Iterable[Tensor], request: ReductionRequest, *, in_place: bool = False
) -> Handle[list[Tensor]]:
    name, works, outputs = _start(tensors, request, in_place=in_place)
    return Handle(name, works, lambda: outputs, outputs if in_place else ())


def _reduced(tensors: Sequence[Tensor], request: ReductionRequest) -> Sequence[Tensor]:
    """Reduce and wait. Gradients flow through the new tensors."""
    if any([wants_gradient(tensor) for tensor in tensors]):
        reduced: tuple[Tensor, ...] = Allreduce.apply(request, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return reduced
    if len(tensors) == 1:
        return [_run_one(tensors[0], request, in_place=False)]
    return _group(tensors, request).wait()


def _compressed(
    tensors: Iterable[Tensor], compression: type[Compressor], request: ReductionRequest
) -> list[Tensor]:
    """Reduce compressed tensors and decompress the results."""
    check_compression(request.kind, compression)
    compressed = [compression.compress(tensor) for tensor in to_list(request.kind, tensors)]
    reduced = _reduced([wire for wire, _ in compressed], request)
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Start an `allreduce` without a gradient. `synchronize` returns a new tensor."""
    request = to_request(
        "allreduce", name, resolve_op(average, op), prescale_factor, postscale_factor, process_set
    )
    return _one(tensor, request)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Start an `allreduce` in place. The tensor must be contiguous."""
    request = to_request(
        "allreduce", name, resolve_op(average, op), prescale_factor, postscale_factor, process_set
    )
    return _one(tensor, request, in_place=True)


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
    """Reduce `tensor` over all ranks and return the result, with the same values on every rank.

    Every rank must call this with the same name, shape and dtype, in any order among named operations;
    calls without a name must come in the same order on every rank. Gradients flow back through the same
    reduction with the same factors (Average and Sum only).

    Args:
        tensor: any shape, not modified. Every integer type, float16, bfloat16 (both summed in float32),
            float32, float64, complex numbers (Sum and Average), bool (Sum and Max are "or", Product and Min are "and").
        average: deprecated; give `op`.
        name: matches calls across ranks; unique among operations in flight.
        compression: sends floating tensors in 16 bits.
        op: Average (the default), Sum, Min, Max, Product or Adasum (floating types, 1, 2, 4, ... ranks; tensors on a
            GPU are copied to the host for it and back).
            Average is the sum divided by the number of ranks and rounded once, so the average of equal tensors is
            that tensor, if their sum is exact. Averages of integers are divided in double and truncated.
        prescale_factor: factor of every rank's tensor, before the reduction.
        postscale_factor: factor of the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: the tensor or an argument is not supported.
        MismatchError: ranks disagree on shape, dtype or op; raised on every rank.
        CollectiveTimeoutError: a rank did not submit in time; the message names it.
        PeerLostError: a rank is gone. The engine is unusable until it is initialised again.
    """
    request = to_request(
        "allreduce", name, resolve_op(average, op), prescale_factor, postscale_factor, process_set
    )
    if compression is NoneCompressor and not wants_gradient(tensor):
        return _run_one(tensor, request, in_place=False)
    return _compressed([tensor], compression, request)[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Run `allreduce` in place, without a gradient. The tensor must be contiguous."""
    request = to_request(
        "allreduce", name, resolve_op(average, op), prescale_factor, postscale_factor, process_set
    )
    _run_one(tensor, request, in_place=True)
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
) -> Handle[list[Tensor]]:
    """Start a `grouped_allreduce`. `synchronize` returns the list of results."""
    request = to_request(
        "grouped_allreduce",
        name,
        resolve_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _group(tensors, request)


def grouped_allreduce_async_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """Start a `grouped_allreduce` in place. The tensors must be contiguous."""
    request = to_request(
        "grouped_allreduce",
        name,
        resolve_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _group(tensors, request, in_place=True)


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
    """Run `allreduce` on several tensors as one operation per dtype. All succeed or all fail.

    There is no fusion copy.
    """
    request = to_request(
        "grouped_allreduce",
        name,
        resolve_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _compressed(tensors, compression, request)


def grouped_allreduce_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Run `grouped_allreduce` in place, without gradients. The tensors must be contiguous."""
    request = to_request(
        "grouped_allreduce",
        name,
        resolve_op(average, op),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _group(tensors, request, in_place=True).wait()


class Allreduce(torch.autograd.Function):
    """`allreduce` with a gradient: the same reduction of the ranks' gradients, with the same factors."""

    @staticmethod
    def forward(
        ctx: Saved[ReductionRequest], request: ReductionRequest, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = request
        return tuple(_reduced(tensors, request))

    @staticmethod
    def backward(ctx: Saved[ReductionRequest], *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        request = ctx.arguments
        check_linear("allreduce", request.reduction.op)
        # `_reduced` is differentiable, for second derivatives with create_graph=True.
        return None, *_reduced(gradients, request.of_gradient())
