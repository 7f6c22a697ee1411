"""What the engine can take: element types, reductions and the checks of tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparkhvd.engine.engine import DType, ReduceOp, TensorView
from sparkhvd.errors import InvalidArgumentError

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


class Reduction(NamedTuple):
    """How tensors are reduced.

    Attributes:
        op: the operation.
        prescale: factor of every rank's tensor.
        postscale: factor of the result.
        process_set: the engine's number of the ranks.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: int


def resolve_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """The reduction that `op` and its deprecated forerunner `average` ask for."""
    if average is None:
        if op is None:
            return Average
        return op if type(op) is ReduceOp else to_op(op)
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


def to_op(op: ReduceOp | int) -> ReduceOp:
    """A reduction given as one of `hvd.Average`, `hvd.Sum`, ... or as its number."""
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{each.name.title()}" for each in ReduceOp)
        raise InvalidArgumentError(f"op={op!r} is no reduction. Give one of {names}.") from None


def engine_dtype(what: str, tensor: Tensor) -> DType:
    """The engine's name of a tensor's element type; checks that the engine can take the tensor at all."""
    if (
        isinstance(tensor, Tensor)
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not _is_dtensor(tensor)
    ):
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None:
            return dtype
    raise InvalidArgumentError(_refusal(what, tensor))


def _is_dtensor(tensor: Tensor) -> bool:
    """Whether each rank holds a part of the tensor, as of those of FSDP2; imports nothing to find out."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _refusal(what: str, tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return f"{what}: expected a torch.Tensor, got {type(tensor).__name__}. Wrap it with torch.as_tensor()."
    if _is_dtensor(tensor):
        return (
            f"{what}: the tensor is a DTensor, of which each rank holds a part (FSDP2, tensor parallelism); those reduce "
            "gradients by themselves. Give the plain model, before fully_shard() or parallelize_module(), or send "
            "tensor.to_local()."
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        return (
            f"{what}: the tensor is on {tensor.device}, and sparkhvd moves tensors of the CPU and of NVIDIA's GPUs. "
            "Move it with .cpu() or .cuda()."
        )
    if tensor.layout is not torch.strided:
        return (
            f"{what}: the tensor has layout {tensor.layout}, and only dense tensors can be sent. "
            "Convert it with .to_dense()."
        )
    return (
        f"{what}: dtype {tensor.dtype} is not supported. Convert the tensor to one of "
        f"{', '.join(str(known).removeprefix('torch.') for known in DTYPES)}."
    )


def by_dtype(what: str, tensors: Sequence[Tensor]) -> dict[tuple[DType, bool], list[int]]:
    """Which tensors have each element type, on the CPU (True) and on a GPU: an operation takes those of one kind."""
    parts: dict[tuple[DType, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        parts.setdefault((engine_dtype(what, tensor), tensor.is_cpu), []).append(index)
    return parts


def require_contiguous(what: str, tensor: Tensor) -> None:
    """Checks that an in-place operation can write into the tensor's own memory."""
    if tensor.is_neg():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs the tensor's own values, and its memory has them with the other "
            "sign (torch's negative bit, as in z.conj().imag). Use the form without the final underscore, or "
            ".resolve_neg()."
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs a contiguous tensor, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}. Use the form without the final underscore, or .contiguous()."
        )


def as_sent(tensor: Tensor) -> Tensor:
    """The values as the engine reads them: row-major, each with its sign; a copy only where they lie otherwise."""
    return tensor.detach().contiguous().resolve_neg()


def view(source: Tensor, target: Tensor | None) -> TensorView:
    """Contiguous tensors of one shape as the engine's operand; no target where the engine makes the result."""
    address = source.data_ptr()
    if target is source:
        return TensorView(address, address, source.shape)
    return TensorView(address, 0 if target is None else target.data_ptr(), source.shape)


def lend(*tensors: Tensor) -> list[torch.UntypedStorage]:
    """The memory of tensors that the engine reads or writes, to be kept until it has finished.

    Not the tensors themselves: `tensor.data = other`, as `module.to()` does it, gives a tensor other memory.
    """
    return [tensor.untyped_storage() for tensor in tensors]


def wants_gradient(tensor: Tensor) -> bool:
    """Whether autograd must see the operation."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that the engine wrote into these tensors."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def gradient_name(name: str | None) -> str | None:
    """Name the collective of the backward pass after that of the forward one."""
    return None if name is None else f"{name}.gradient"


def check_linear(operation: str, op: ReduceOp) -> None:
    """Refuse the gradient of a reduction that is not linear."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{operation}(op={op.name.title()}) has no gradient. Use Average or Sum, or detach the tensor."
        )
