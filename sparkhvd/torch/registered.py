"""Tensors in registered memory, for reductions without copies between the ranks of a host."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.work import Buffer
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integer, to_integers, to_list
from sparkhvd.torch.collectives.tensors import engine_dtype, paired
from sparkhvd.torch.context import Context, context
from sparkhvd.torch.cuda import Device, RankGpu, open_device
from sparkhvd.torch.process_sets import ProcessSet, global_process_set, set_id

_MAX_BYTES = (1 << 63) - 1  # torch counts in signed 64 bits


def registered_empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    process_set: ProcessSet = global_process_set,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Create a tensor in memory shared by the ranks of a host.

    Every rank must call this with the same size. Waits for all ranks. `allreduce_` of this tensor, or of the same part
    of it on every rank, makes no copies. In all other respects it is an ordinary tensor. Its memory is freed with the
    last tensor that uses it, and may be used after `shutdown()`. Other ranks write into the memory until an operation
    on it has finished. If the ranks cannot share memory, the tensor gets ordinary memory. On a GPU the memory belongs
    to this rank alone and is registered with NCCL. Operations in place may then use the links between GPUs without a
    copy.

    Args:
        shape: the length of every dimension.
        dtype: None means torch's default.
        process_set: the ranks that share it and will reduce it.
        device: None is the CPU; "cuda" the rank's GPU.

    Returns:
        A tensor of zeros.

    Raises:
        InvalidArgumentError: the shape is wrong, no collective supports the dtype, the device is not this rank's, or this
            rank has not enough memory (the others then get their tensors, and allreduces of them are copied).
        MismatchError: ranks ask for different numbers of bytes.
        CollectiveTimeoutError, PeerLostError: as for `allreduce`.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(
            f"registered_empty: dtype={dtype!r} is not a torch dtype. Give for example torch.float32."
        )
    engine_dtype("registered_empty", torch.empty(0, dtype=paired((), dtype)[1]))
    size = _size(shape, dtype)
    ctx = context()
    number = set_id(process_set)
    gpu = _gpu(ctx, device)
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype, device=device)
    name = ctx.name("registered_empty", None, number)
    num_bytes = size.numel() * dtype.itemsize
    if gpu is not None:
        made = ctx.engine.allocate(num_bytes, name=name, process_set=number, device=gpu.ordinal)
        return gpu.over_buffer(made).view(dtype).view(size)
    buffer = ctx.engine.allocate(num_bytes, name=name, process_set=number)
    return over_buffer(buffer, dtype, size.numel()).view(size)


def _gpu(ctx: Context, asked: torch.device | str | int | None) -> Device | None:
    """Check the device and return this rank's GPU, or None for memory on the CPU."""
    try:
        place = torch.device("cpu" if asked is None else asked)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"registered_empty: device={asked!r} is not a torch device. Give None or 'cuda'."
        ) from error
    if place.type == "cpu":
        return None
    if place.type != "cuda":
        raise InvalidArgumentError(
            f"registered_empty: device={asked!r} is not supported; only memory of the CPU and of NVIDIA GPUs can be registered. "
            "Give None or 'cuda'."
        )
    device = ctx.part(RankGpu).device
    if device is None:
        return open_device(ctx, torch.cuda.current_device() if place.index is None else place.index)
    if place.index not in (None, device.ordinal):
        raise InvalidArgumentError(
            f"registered_empty: device={asked!r}, but this rank uses cuda:{device.ordinal}, the GPU of its first GPU tensor. "
            "Give device='cuda'."
        )
    return device


def _size(shape: int | Iterable[int], dtype: torch.dtype) -> torch.Size:
    """Convert the shape to torch's, if memory can hold it."""
    items = [shape]
    if to_integer(shape) is None:
        items = to_list("registered_empty", shape, "lengths")  # type: ignore[arg-type]  # no integer
    lengths = to_integers(items)
    if lengths is None or min(lengths, default=0) < 0:
        raise InvalidArgumentError(
            f"registered_empty: the shape is {shape!r}; every length must be an integer of 0 or more."
        )
    # Count a length of 0 as 1, because torch computes the strides with it and they must not overflow either.
    num_bytes = math.prod(max(length, 1) for length in lengths) * dtype.itemsize
    if num_bytes > _MAX_BYTES:
        raise InvalidArgumentError(
            f"registered_empty: a tensor of shape {shape!r} and {dtype} would need {num_bytes} bytes, more than any "
            "memory has. Ask for less."
        )
    return torch.Size(lengths)


def over_buffer(buffer: Buffer, dtype: torch.dtype, count: int, first_byte: int = 0) -> Tensor:
    """View elements of a buffer as a tensor of one dimension. Its storage keeps the buffer alive."""
    address = buffer.address + first_byte
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    memory.buffer = buffer  # type: ignore[attr-defined]  # instances of ctypes' arrays take attributes
    return torch.frombuffer(memory, dtype=dtype)
