"""Collectives on torch tensors, in Horovod's signatures, waiting and asynchronous.

The asynchronous forms return a `Handle` at once; `synchronize(handle)` waits and gives the result,
`poll(handle)` only looks. A tensor that was handed over must not be changed before that.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine import DType, ReduceOp, TensorView, Work
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch._context import Context, context
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

DTYPES: dict[torch.dtype, DType] = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.uint16: DType.UINT16,
    torch.int16: DType.INT16,
    torch.uint32: DType.UINT32,
    torch.int32: DType.INT32,
    torch.uint64: DType.UINT64,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bool: DType.BOOL,
}

# Smaller results of an allgather are copied: a copy of 16 KiB costs less than keeping the operation alive.
COPIED_BYTES = 16 << 10


class Handle:
    """An operation in flight; give it to `poll` and `synchronize`."""

    __slots__ = ("_finish", "_result", "_works", "name")

    def __init__(self, name: str, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        self.name = name
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def __repr__(self) -> str:
        return f"<Handle {self.name!r}>"

    def done(self) -> bool:
        """Whether `wait` would return at once; raises what `wait` would raise."""
        return all([work.done() for work in self._works])

    def wait(self) -> Any:
        """Wait, and give the result; later calls give the same object."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
            self._works = ()  # frees what the operation kept alive
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return without waiting.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module, or the ranks
            disagreed (`MismatchError`).
        CollectiveError: the set of ranks changed.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result.

    Raises:
        InvalidArgumentError: `handle` does not come from an asynchronous call of this module.
        MismatchError: the ranks disagreed on shape, dtype or operation; raised on every rank.
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank is gone; the contents of the tensors are undefined.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise InvalidArgumentError(
            f"{handle!r} is not a handle. Give what an asynchronous call such as allreduce_async returned."
        )
    return handle


# --- Checks. ---


def resolve_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """The reduction that `op` and its deprecated forerunner `average` ask for."""
    if average is None:
        return Average if op is None else ReduceOp(op)
    if op is not None:
        raise InvalidArgumentError(
            f"average={average!r} and op={op!r} were both given. op replaces average: give op alone."
        )
    warnings.warn(
        "average= is deprecated; give op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def engine_dtype(what: str, tensor: Tensor) -> DType:
    """The engine's name of a tensor's element type; checks that the engine can take the tensor at all."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgumentError(
            f"{what}: expected a torch.Tensor, got {type(tensor).__name__}. Wrap it with torch.as_tensor()."
        )
    if not tensor.is_cpu:
        raise InvalidArgumentError(
            f"{what}: the tensor is on {tensor.device}, and this version of sparkhvd moves CPU tensors only. "
            "Move it with .cpu()."
        )
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{what}: the tensor has layout {tensor.layout}, and only dense tensors can be sent. "
            "Convert it with .to_dense()."
        )
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgumentError(
            f"{what}: dtype {tensor.dtype} is not supported. Convert the tensor to one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in DTYPES)}."
        )
    return dtype


def _check_op(what: str, op: ReduceOp) -> None:
    if op is Adasum:
        raise InvalidArgumentError(
            f"{what}: op=Adasum is not in this version of sparkhvd. Use Average or Sum."
        )


def _require_contiguous(what: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs a contiguous tensor, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}. Use the form without the final underscore, or .contiguous()."
        )


def wants_gradient(tensor: Tensor) -> bool:
    """Whether autograd must see the operation."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that the engine wrote into these tensors."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


# --- allreduce ---


def start_allreduce(
    ctx: Context,
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> list[Work]:
    """Submit contiguous tensors as one operation per element type; usually that is one."""
    parts: dict[DType, list[int]] = {}
    for index, tensor in enumerate(inputs):
        parts.setdefault(engine_dtype(name, tensor), []).append(index)
    _check_op(name, op)
    works = []
    for dtype, indices in parts.items():
        views = [
            TensorView(inputs[i].data_ptr(), outputs[i].data_ptr(), tuple(inputs[i].shape))
            for i in indices
        ]
        works.append(
            ctx.engine.allreduce(
                views,
                name=name if len(parts) == 1 else f"{name}.{dtype.name.lower()}",
                dtype=dtype,
                op=op,
                prescale=prescale,
                postscale=postscale,
                keep=(inputs, outputs),
            )
        )
    return works


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
    return _allreduce_async(
        [tensor], name, op, prescale_factor, postscale_factor, process_set, True
    )


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
    return _allreduce_async_(
        [tensor], name, op, prescale_factor, postscale_factor, process_set, True
    )


def _allreduce_async(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    ctx = context()
    set_id(process_set)
    name = ctx.name("allreduce" if single else "grouped_allreduce", name)
    for tensor in tensors:
        engine_dtype(name, tensor)
    inputs = [tensor.detach().contiguous() for tensor in tensors]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    works = start_allreduce(ctx, name, inputs, outputs, op, prescale, postscale)
    return Handle(name, works, lambda: outputs[0] if single else outputs)


def _allreduce_async_(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    ctx = context()
    set_id(process_set)
    name = ctx.name("allreduce" if single else "grouped_allreduce", name)
    for tensor in tensors:
        engine_dtype(name, tensor)
        _require_contiguous(name, tensor)
    tensors = list(tensors)
    works = start_allreduce(ctx, name, tensors, tensors, op, prescale, postscale)

    def finish() -> Any:
        _written(tensors)
        return tensors[0] if single else tensors

    return Handle(name, works, finish)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
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
        op: Average (the default), Sum, Min, Max or Product. Average of integers sums, multiplies by 1/size
            in double and truncates.
        prescale_factor: factor of every rank's tensor, before it is combined.
        postscale_factor: factor of the result.
        process_set: only `global_process_set` in this version.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: the tensor or an argument is not supported.
        MismatchError: ranks disagree on shape, dtype or op; raised on every rank.
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank is gone. The engine is unusable until it is initialised again.
    """
    op = resolve_op(average, op)
    return _allreduce(
        [tensor], name, compression, op, prescale_factor, postscale_factor, process_set, True
    )[0]


def _allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    single: bool,
) -> list[Tensor]:
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    if any(wants_gradient(wire) for wire in wires):
        from sparkhvd.torch.autograd import GroupedAllreduce  # it builds on this module

        reduced: Sequence[Tensor] = GroupedAllreduce.apply(  # type: ignore[no-untyped-call]  # torch's
            name, op, prescale, postscale, process_set, single, *wires
        )
    else:
        result = _allreduce_async(wires, name, op, prescale, postscale, process_set, single).wait()
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
    handle = _allreduce_async_(
        [tensor], name, op, prescale_factor, postscale_factor, process_set, True
    )
    result: Tensor = handle.wait()
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce`; `synchronize` gives the list of results."""
    op = resolve_op(average, op)
    return _allreduce_async(
        tensors, name, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce` into the tensors themselves, which must be contiguous."""
    op = resolve_op(average, op)
    return _allreduce_async_(
        tensors, name, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one operation (one per dtype), without copying them together."""
    op = resolve_op(average, op)
    return _allreduce(
        tensors, name, compression, op, prescale_factor, postscale_factor, process_set, False
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` into the tensors themselves, which must be contiguous; no gradient."""
    op = resolve_op(average, op)
    handle = _allreduce_async_(
        tensors, name, op, prescale_factor, postscale_factor, process_set, False
    )
    result: list[Tensor] = handle.wait()
    return result


# --- allgather ---


def start_allgather(ctx: Context, name: str, tensor: Tensor) -> Work:
    """Submit a tensor of at least one dimension."""
    dtype = engine_dtype(name, tensor)
    if tensor.dim() == 0:
        raise InvalidArgumentError(
            f"{name}: a tensor without dimensions cannot be joined along the first one. "
            "Give tensor.reshape(1)."
        )
    tensor = tensor.detach().contiguous()
    view = TensorView(tensor.data_ptr(), 0, tuple(tensor.shape))
    return ctx.engine.allgather(view, name=name, dtype=dtype, keep=tensor)


def gathered(work: Work, dtype: torch.dtype, shape: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
    """The result of a finished allgather of tensors like `shape`, and every rank's rows."""
    output = work.output()
    full = (sum(output.rows), *shape[1:])
    if output.num_bytes == 0:
        return torch.empty(full, dtype=dtype), output.rows
    # The engine allocated this memory, and it lives as long as the work: the tensor's storage keeps the
    # buffer, and the buffer keeps the work.
    buffer: Any = (ctypes.c_char * output.num_bytes).from_address(output.address)
    buffer.work = work
    tensor = torch.frombuffer(buffer, dtype=dtype).view(full)
    return (tensor.clone() if output.num_bytes <= COPIED_BYTES else tensor), output.rows


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an `allgather`; `synchronize` gives the joined tensor. No gradient flows through it."""
    ctx = context()
    set_id(process_set)
    name = ctx.name("allgather", name)
    work = start_allgather(ctx, name, tensor)
    dtype, shape = tensor.dtype, tensor.shape
    return Handle(name, (work,), lambda: gathered(work, dtype, shape)[0])


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Join every rank's tensor along the first dimension, in the order of ranks.

    First dimensions may differ between ranks and may be 0; the others and the dtype may not. The gradient
    is Horovod's: the *average* of the ranks' gradients, cut to this rank's rows.

    Args:
        tensor: at least one dimension, any supported dtype, not modified.
        name: as for `allreduce`.
        process_set: only `global_process_set` in this version.

    Returns:
        A new tensor; the same on every rank.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    if wants_gradient(tensor):
        from sparkhvd.torch.autograd import Allgather  # it builds on this module

        joined: Tensor = Allgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]  # torch's
        return joined
    result: Tensor = allgather_async(tensor, name, process_set).wait()
    return result


# --- broadcast ---


def start_broadcast(
    ctx: Context, name: str, source: Tensor, target: Tensor, root_rank: int
) -> Work:
    """Submit contiguous tensors; `target` may be `source`."""
    dtype = engine_dtype(name, source)
    size = ctx.engine.topology.size
    if not 0 <= root_rank < size:
        raise InvalidArgumentError(
            f"{name}: root_rank is {root_rank}; with {size} ranks it must be from 0 to {size - 1}."
        )
    view = TensorView(source.data_ptr(), target.data_ptr(), tuple(source.shape))
    return ctx.engine.broadcast(
        view, root_rank=root_rank, name=name, dtype=dtype, keep=(source, target)
    )


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `broadcast`; `synchronize` gives a new tensor. No gradient flows through it."""
    ctx = context()
    set_id(process_set)
    name = ctx.name("broadcast", name)
    engine_dtype(name, tensor)
    source = tensor.detach().contiguous()
    target = torch.empty_like(source)
    work = start_broadcast(ctx, name, source, target, root_rank)
    return Handle(name, (work,), lambda: target)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `broadcast` into `tensor` itself, which must be contiguous."""
    ctx = context()
    set_id(process_set)
    name = ctx.name("broadcast", name)
    engine_dtype(name, tensor)
    _require_contiguous(name, tensor)
    work = start_broadcast(ctx, name, tensor, tensor, root_rank)

    def finish() -> Tensor:
        _written([tensor])
        return tensor

    return Handle(name, (work,), finish)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return rank `root_rank`'s tensor on every rank.

    Args:
        tensor: same shape and dtype on every rank, not modified.
        root_rank: the global rank that has the values.
        name: as for `allreduce`.
        process_set: only `global_process_set` in this version.

    Returns:
        A new tensor. The gradient is Horovod's: the *average* of the ranks' gradients on `root_rank`, zero
        on the others.

    Raises:
        InvalidArgumentError, MismatchError, CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    if wants_gradient(tensor):
        from sparkhvd.torch.autograd import Broadcast  # it builds on this module

        sent: Tensor = Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]  # torch's
        return sent
    result: Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`broadcast` into `tensor` itself, which must be contiguous; no gradient."""
    result: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called this as often as this rank."""
    ctx = context()
    set_id(process_set)
    ctx.engine.barrier(name=ctx.name("barrier", None)).wait()
