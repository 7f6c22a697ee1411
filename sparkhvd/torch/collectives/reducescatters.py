"""`reducescatter`, single and grouped: each rank's rows of the reduced tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.errors import InvalidArgumentError, UnsupportedError
from sparkhvd.torch.arguments import check_compression, to_list
from sparkhvd.torch.collectives import cuda
from sparkhvd.torch.collectives.allgathers import grouped_allgather
from sparkhvd.torch.collectives.tensors import (
    Average,
    Handle,
    Operation,
    ReductionRequest,
    Saved,
    as_sent,
    check_linear,
    engine_dtype,
    resolve_op,
    start_group,
    to_request,
    view,
    wants_gradient,
)
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.context import context
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, members, set_id


def own_rows(rows: int, size: int, rank: int) -> int:
    """Number of rows of a rank. The first ranks get an extra row if `rows` is not divisible by `size`."""
    return rows // size + (rank < rows % size)


def _start(
    tensors: Iterable[Tensor], request: ReductionRequest
) -> tuple[str, list[Operation], list[Tensor]]:
    """Submit tensors as one operation per element type and return its name, the operations and their outputs."""
    ctx = context()
    number = set_id(request.process_set)
    name = ctx.name(request.kind, request.name, number)
    if request.reduction.op is ReduceOp.ADASUM:
        raise UnsupportedError(f"{name}: Adasum is for allreduce only. Use Average or Sum.")
    tensors = to_list(name, tensors)
    ranks = members(request.process_set)
    rank = ctx.engine.topology.rank
    place = ranks.index(rank) if rank in ranks else len(ranks)  # the engine refuses other ranks
    for tensor in tensors:
        engine_dtype(name, tensor)
        if tensor.dim() == 0:
            raise InvalidArgumentError(
                f"{name}: Reducescatter does not support scalar inputs: it divides the first dimension. "
                "Use allreduce."
            )
    inputs = [as_sent(tensor) for tensor in tensors]
    outputs = [x.new_empty((own_rows(x.shape[0], len(ranks), place), *x.shape[1:])) for x in inputs]
    reduction = request.reduction

    def start(part: str, dtype: DType, indices: list[int], digest: tuple[int, ...]) -> Operation:
        ins, outs = [inputs[i] for i in indices], [outputs[i] for i in indices]
        if not ins[0].is_cpu:
            return cuda.start_reducescatter(ctx, part, ins, outs, reduction, number, digest)
        views = [view(x, y) for x, y in zip(ins, outs, strict=True)]
        kind = Collective.REDUCESCATTER
        call = ctx.engine.prepare(kind, views, dtype, reduction, number, numbers=digest)
        return ctx.engine.start(call, part, (inputs, outputs))

    return name, start_group(name, inputs, start, reduction), outputs


def _reduced(tensors: Sequence[Tensor], request: ReductionRequest) -> Sequence[Tensor]:
    """Reduce and wait. Gradients flow through the new tensors."""
    if any([wants_gradient(tensor) for tensor in tensors]):
        reduced: tuple[Tensor, ...] = Reducescatter.apply(request, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return reduced
    name, works, outputs = _start(tensors, request)
    return Handle(name, works, lambda: outputs).wait()


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


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Start a `reducescatter` without a gradient. `synchronize` returns this rank's rows."""
    request = to_request(
        "reducescatter", name, resolve_op(None, op), prescale_factor, postscale_factor, process_set
    )
    name, works, outputs = _start([tensor], request)
    return Handle(name, works, lambda: outputs[0])


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

    Each of n ranks gets d // n of d rows, and the first d % n ranks one more; a rank may get 0 rows. The gradient
    is Horovod's: the ranks' gradients concatenated, with the same factors, and with Sum times the number of ranks.

    Args:
        tensor: at least one dimension, same shape and dtype on every rank, not modified; dtypes as for
            `allreduce`.
        name: as for `allreduce`.
        compression: as for `allreduce`.
        op: Average (the default), Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: factor of every rank's tensor, before the reduction.
        postscale_factor: factor of the result.

    Returns:
        A new tensor with this rank's rows.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    request = to_request(
        "reducescatter", name, resolve_op(None, op), prescale_factor, postscale_factor, process_set
    )
    return _compressed([tensor], compression, request)[0]


def grouped_reducescatter_async(
    tensors: Iterable[Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """Start a `grouped_reducescatter` without a gradient. `synchronize` returns this rank's rows.

    The result is a list with an entry per tensor.
    """
    request = to_request(
        "grouped_reducescatter",
        name,
        resolve_op(None, op),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    name, works, outputs = _start(tensors, request)
    return Handle(name, works, lambda: outputs)


def grouped_reducescatter(
    tensors: Iterable[Tensor],
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Run `reducescatter` on several tensors as one operation per dtype.

    All succeed or all fail.
    """
    request = to_request(
        "grouped_reducescatter",
        name,
        resolve_op(None, op),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return _compressed(tensors, compression, request)


class Reducescatter(torch.autograd.Function):
    """`reducescatter` with a gradient: the concatenated gradients of the ranks, with the same factors.

    As in Horovod it is multiplied by the number of ranks with Sum.
    """

    @staticmethod
    def forward(
        ctx: Saved[ReductionRequest], request: ReductionRequest, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = request
        return tuple(_reduced(tensors, request))

    @staticmethod
    def backward(ctx: Saved[ReductionRequest], *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        _, name, reduction, process_set = ctx.arguments.of_gradient()
        check_linear("reducescatter", reduction.op)
        factor = reduction.prescale * reduction.postscale
        if reduction.op is ReduceOp.SUM:
            factor *= len(members(process_set))
        scaled = [gradient * factor if factor != 1 else gradient for gradient in gradients]
        return None, *grouped_allgather(scaled, name=name, process_set=process_set)
