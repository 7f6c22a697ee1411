"""Tensors as operands of the engine: element types, checks, memory, autograd."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparkhvd.engine.engine import DType, ReduceOp, TensorView
from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "DTYPES",
    "Saved",
    "as_pairs",
    "as_sent",
    "by_dtype",
    "engine_dtype",
    "gradient_name",
    "lend",
    "paired",
    "require_contiguous",
    "view",
    "wants_gradient",
    "written",
]

_Arguments = TypeVar("_Arguments")

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


class Saved(Protocol[_Arguments]):
    """Autograd's context, as far as it carries arguments from `forward` to `backward`."""

    arguments: _Arguments


def engine_dtype(what: str, tensor: Tensor) -> DType:
    """Return the engine's name of a tensor's element type.

    Raises:
        InvalidArgumentError: the engine cannot take the tensor.
    """
    if (
        # The usual type first: this is part of every operation.
        (type(tensor) is Tensor or (isinstance(tensor, Tensor) and not _is_dtensor(tensor)))
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
    ):
        dtype = DTYPES.get(tensor.dtype)
        if dtype is not None:
            return dtype
    raise InvalidArgumentError(_refusal(what, tensor))


def _is_dtensor(tensor: Tensor) -> bool:
    """Check whether each rank holds a part of the tensor, as with FSDP2; imports nothing for it."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # torch 2.4 has it in the second place only.
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        if kind := getattr(sys.modules.get(module), "DTensor", None):
            return isinstance(tensor, kind)
    return False


def _refusal(what: str, tensor: object) -> str:
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
    if tensor.is_complex():
        return (
            f"{what}: dtype {tensor.dtype} is not supported, and neither is any other complex one. Send its pairs of real "
            "numbers, torch.view_as_real(tensor)."
        )
    return (
        f"{what}: dtype {tensor.dtype} is not supported. Convert the tensor to one of "
        f"{', '.join(str(known).removeprefix('torch.') for known in DTYPES)}."
    )


def by_dtype(what: str, tensors: Sequence[Tensor]) -> dict[tuple[DType, bool], list[int]]:
    """Group tensors' indices by element type and plane (True: CPU, False: GPU): an operation takes those of one group."""
    parts: dict[tuple[DType, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        parts.setdefault((engine_dtype(what, tensor), tensor.is_cpu), []).append(index)
    return parts


def require_contiguous(what: str, tensor: Tensor) -> None:
    """Check that an in-place operation can write into the tensor's own memory."""
    if tensor.is_neg():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs the tensor's own values, and its memory has them with the other "
            "sign (torch's negative bit, as in z.conj().imag). Use the form without the final underscore, or "
            ".resolve_neg()."
        )
    if tensor.is_conj():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs the tensor's own values, and its memory has their conjugates (torch's "
            "conjugate bit, as in z.conj()). Use the form without the final underscore, or .resolve_conj()."
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{what}: an in-place operation needs a contiguous tensor, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}. Use the form without the final underscore, or .contiguous()."
        )


def paired(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and type in which the engine takes memory of a type: complex numbers are pairs of real ones."""
    return ((*shape, 2), dtype.to_real()) if dtype.is_complex else (tuple(shape), dtype)


def as_pairs(what: str, tensor: Tensor, op: ReduceOp, *, in_place: bool) -> Tensor:
    """Return complex numbers as pairs of real ones, which sums treat alike; other tensors as they are.

    Raises:
        InvalidArgumentError: the reduction has no meaning for complex numbers, or cannot be done in place.
    """
    if not (isinstance(tensor, Tensor) and tensor.is_complex()):
        return tensor
    if tensor.layout is not torch.strided or _is_dtensor(tensor):
        raise InvalidArgumentError(_refusal(what, tensor))
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{what}: op is {op.name.title()}, which complex numbers do not have. Use Sum or Average, or send "
            "torch.view_as_real(tensor)."
        )
    if in_place:
        require_contiguous(what, tensor)
    return torch.view_as_real(tensor.detach().resolve_conj())


def as_sent(tensor: Tensor) -> Tensor:
    """Return the values as the engine reads them: row-major, signs resolved; copied only where they lie otherwise."""
    return tensor.detach().contiguous().resolve_neg()


def view(source: Tensor, target: Tensor | None) -> TensorView:
    """Describe contiguous tensors of one shape to the engine; no target where the engine makes the result."""
    address = source.data_ptr()
    output = address if target is source else 0 if target is None else target.data_ptr()
    # A named tuple's own constructor takes twice the time.
    return tuple.__new__(TensorView, (address, output, source.shape))


def lend(*tensors: Tensor) -> list[torch.UntypedStorage]:
    """Return the memory of tensors that the engine reads or writes, to be kept until it has finished.

    Keeping the tensors would not do: `tensor.data = other`, as in `module.to()`, gives a tensor other memory.
    """
    return [tensor.untyped_storage() for tensor in tensors]


def wants_gradient(tensor: Tensor) -> bool:
    """Check whether autograd must see the operation."""
    return isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that the engine wrote into these tensors."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def gradient_name(name: str | None) -> str | None:
    """Name the collective of the backward pass after that of the forward one."""
    return None if name is None else f"{name}.gradient"
