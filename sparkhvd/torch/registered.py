"""Tensors in registered memory: the ranks of a host reduce them where they lie."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine import Buffer
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch._context import context
from sparkhvd.torch.arguments import to_integer, to_integers, to_list
from sparkhvd.torch.collectives.tensors import engine_dtype
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

__all__ = ["over_buffer", "registered_empty"]

_MAX_BYTES = (1 << 63) - 1  # torch counts in signed 64 bits


def registered_empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A tensor in memory that the ranks of a host share; every rank must call this, with as many bytes. Waits.

    `allreduce_` of such a tensor, or of the same part of it on every rank, copies nothing. In all else it is a
    tensor as any other. Its memory is freed with the last tensor over it, and may be used after `shutdown()`.
    Until an operation on it has finished, peers write into it. Where ranks cannot share memory it is ordinary
    memory.

    Args:
        shape: the length of every dimension.
        dtype: None means torch's default.
        process_set: the ranks that share it and will reduce it.

    Returns:
        A tensor of zeros.

    Raises:
        InvalidArgumentError: the shape is wrong, no collective takes the dtype, or this rank has not enough memory
            (the others then get theirs, and allreduces of it are copied).
        MismatchError: ranks ask for different numbers of bytes.
        CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(
            f"registered_empty: dtype={dtype!r} is no dtype of torch. Give one such as torch.float32."
        )
    engine_dtype("registered_empty", torch.empty(0, dtype=dtype))
    size = _size(shape, dtype)
    ctx = context()
    number = set_id(process_set)
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype)
    name = ctx.name("registered_empty", None, number)
    num_bytes = size.numel() * dtype.itemsize
    buffer = ctx.engine.allocate(num_bytes, name=name, process_set=number)
    return over_buffer(buffer, dtype, size.numel()).view(size)


def _size(shape: Any, dtype: torch.dtype) -> torch.Size:
    """The shape as torch's, if memory can have it."""
    single = to_integer(shape)
    given = to_list("registered_empty", shape, "lengths") if single is None else [single]
    lengths = to_integers(given)
    if lengths is None or min(lengths, default=0) < 0:
        raise InvalidArgumentError(
            f"registered_empty: the shape is {shape!r}; every length must be an integer of 0 or more."
        )
    # Lengths of 0 count as 1: torch's strides must be possible too.
    num_bytes = math.prod(max(length, 1) for length in lengths) * dtype.itemsize
    if num_bytes > _MAX_BYTES:
        raise InvalidArgumentError(
            f"registered_empty: a tensor of shape {shape!r} and {dtype} would need {num_bytes} bytes, more than any "
            "memory has. Ask for less."
        )
    return torch.Size(lengths)


def over_buffer(buffer: Buffer, dtype: torch.dtype, count: int, first_byte: int = 0) -> Tensor:
    """Elements of a buffer as a tensor of one dimension, with a storage of its own that keeps the buffer alive."""
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(
        buffer.address + first_byte
    )
    memory.buffer = buffer
    return torch.frombuffer(memory, dtype=dtype)
