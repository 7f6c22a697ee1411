"""Tensors as torch hands them over: flat memory of the engine's types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sparkhvd.engine.engine import DType, TensorView
from sparkhvd.engine.engine import Work as Operation
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import DTYPES, lend

__all__ = [
    "Flat",
    "by_dtype",
    "bytes_of",
    "is_plain",
    "joined",
    "moved",
    "numbers_of",
    "only",
    "owners",
    "reading",
    "reading_into",
    "received_numbers",
    "reduced",
    "restore",
    "restoring",
    "room_for",
    "split_flat",
    "width",
    "write",
]

_Item = TypeVar("_Item")


class Flat(NamedTuple):
    """Contiguous numbers, and what has to happen when they have been written.

    Attributes:
        numbers: one dimension, of a type of the engine.
        restore: copies them to where the caller's tensor lies; None where that is the same memory.
        shape: of the caller's tensor, in numbers; None = one dimension.
    """

    numbers: Tensor
    restore: Callable[[], object] | None
    shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> DType:
        """Engine's name of their type."""
        return DTYPES[self.numbers.dtype]

    @property
    def view(self) -> TensorView:
        """Numbers that are read and written."""
        address = self.numbers.data_ptr()
        return TensorView(address, address, (self.numbers.numel(),))

    @property
    def shaped(self) -> TensorView:
        """As `view`, in the caller's shape, which the engine compares across ranks."""
        address = self.numbers.data_ptr()
        shape = (self.numbers.numel(),) if self.shape is None else self.shape
        return TensorView(address, address, shape)


def is_plain(tensor: Tensor) -> bool:
    """Check that a tensor's memory on the CPU has its numbers, one after the other."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def moved(tensor: Tensor) -> Flat:
    """Return a tensor for an operation that computes nothing: complex numbers are pairs, unknown types bytes."""
    _check_dense(tensor)
    plain = tensor.detach()
    shape = tensor.shape if width(tensor) == 1 else (*tensor.shape, width(tensor))
    if is_plain(plain):
        return Flat(numbers_of(plain), None, shape)
    copy = plain.contiguous().resolve_conj().resolve_neg()
    return Flat(numbers_of(copy), lambda: plain.copy_(copy), shape)


def reduced(what: str, tensor: Tensor) -> Flat:
    """Return a tensor for a reduction.

    Raises:
        InvalidArgumentError: the engine does not compute with its type.
    """
    if tensor.dtype not in DTYPES and not tensor.is_complex():
        raise InvalidArgumentError(
            f"{what}: the tensor has dtype {tensor.dtype}, with which no reduction computes. Convert it, for example "
            "with .float()."
        )
    return moved(tensor)


def numbers_of(plain: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as numbers in one dimension."""
    flat = plain.view(-1)
    if flat.dtype in DTYPES:
        return flat
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat.view(torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory, or a copy, as bytes in one dimension."""
    return tensor.contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        where = tensor.layout if tensor.is_cpu else tensor.device
        raise InvalidArgumentError(
            f"backend 'sparkhvd': the tensor is {where}; this collective takes dense tensors on the CPU. Use "
            ".to_dense() or .cpu(); all_reduce takes sparse ones."
        )


def width(tensor: Tensor) -> int:
    """Return how many numbers an element is."""
    if tensor.dtype in DTYPES:
        return 1
    return 2 if tensor.is_complex() else tensor.dtype.itemsize


def only(what: str, items: Sequence[_Item]) -> _Item:
    """Return the only item of a list: torch's interface has one per device."""
    if len(items) != 1:
        raise InvalidArgumentError(
            f"{what}: got {len(items)} tensors for one rank. Give one; the coalesced forms take several."
        )
    return items[0]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of several tensors, one after the other, in new memory."""
    parts = [moved(tensor).numbers for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def split_flat(numbers: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy numbers, which lie one after the other, to tensors."""
    first = 0
    for tensor in tensors:
        target = moved(tensor)
        count = target.numbers.numel()
        target.numbers.copy_(numbers[first : first + count])
        if target.restore is not None:
            target.restore()
        first += count


def reading(numbers: Tensor) -> TensorView:
    """Describe numbers that are read; the engine makes the result, or there is none."""
    return TensorView(numbers.data_ptr(), 0, (numbers.numel(),))


def reading_into(source: Tensor, target: Tensor) -> TensorView:
    """Describe numbers that are read, and memory for the result."""
    return TensorView(source.data_ptr(), target.data_ptr(), (source.numel(),), target.nbytes)


def owners(flats: Sequence[Flat]) -> object:
    """Return the memory of tensors, to be kept until the engine has finished."""
    return lend(*[each.numbers for each in flats])


def restore(flat: Flat) -> None:
    """Copy written numbers to the caller's tensor, where it lies elsewhere."""
    if flat.restore is not None:
        flat.restore()


def write(flat: Flat, numbers: Tensor) -> None:
    """Write numbers into the caller's tensor."""
    flat.numbers.copy_(numbers)
    restore(flat)


def restoring(flats: Sequence[Flat]) -> Callable[[object], None] | None:
    """Return what restores several tensors; None where none needs it."""
    restores = [each.restore for each in flats if each.restore is not None]
    if not restores:
        return None

    def finish(_: object) -> None:
        for restore in restores:
            restore()

    return finish


def by_dtype(flats: Sequence[Flat]) -> list[tuple[DType, list[Flat]]]:
    """Return tensors by the engine's type: an operation has one."""
    parts: dict[DType, list[Flat]] = {}
    for flat in flats:
        parts.setdefault(flat.dtype, []).append(flat)
    return list(parts.items())


def room_for(like: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return memory for the numbers of several tensors."""
    return like.new_empty(sum([tensor.numel() * width(tensor) for tensor in tensors]))


def received_numbers(work: Operation, dtype: torch.dtype) -> Tensor:
    """Return a copy of what the engine has gathered in its own memory."""
    output = work.output()
    if not output.num_bytes:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * output.num_bytes).from_address(output.address)
    return torch.frombuffer(memory, dtype=dtype).clone()
