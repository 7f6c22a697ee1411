"""CUDA in torch as this package uses it: streams, events, memory, and the path of NCCL. Imports no CUDA.

All other modules use a `Device`, so that tests can run the same code on a stand-in. A rank has one device, which the
first tensor on it (or `join(device)`) opens.

**Order.** An operation waits for the pending work of its caller's current stream, and runs on a stream of the
engine. `Device.stream()` is that current stream; `Work.wait_stream` makes it wait for the result. The host waits
only for the other ranks' submissions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from sparkhvd.engine.engine import Engine
from sparkhvd.engine.work import Buffer
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.context import Context, ContextPart

# Folders of NCCL in the packages of pip, under the directories of `sys.path`.
_PLACES = ("nvidia/nccl/lib", "nvidia/cu13/lib", "nccl/lib")
_NCCL = "libnccl.so.2"
# torch's `_foreach_copy_` has no CUDA kernel for these, although its `copy_` has.
_COPIED_ALONE = frozenset((torch.uint16, torch.uint32, torch.uint64))


class Device(Protocol):
    """A GPU as collectives need it.

    Attributes:
        ordinal: its number, for torch as for the driver.
    """

    ordinal: int

    def stream(self) -> int:
        """The driver's handle of this thread's current stream.

        Raises:
            InvalidArgumentError: the stream is being captured into a graph.
        """

    def raw_stream(self) -> int:
        """`stream` without the check for capture, because the submission checks."""

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a factory of `with` blocks that set this thread's current stream in any thread."""

    def await_stream(self, stream: int) -> None:
        """Let the current stream wait for the pending work of another stream, given by its handle."""

    def keep_for(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has used it, also if it is not the tensor's own."""

    def over_buffer(self, buffer: Buffer) -> Tensor:
        """View registered memory as a tensor of bytes. Its storage keeps the buffer."""


class CudaDevice:
    """A device of torch.cuda."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            refuse_capture()
        return self.raw_stream()

    def raw_stream(self) -> int:
        return self._current_stream(self.ordinal)

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        stream = torch.cuda.current_stream(self.ordinal)
        return lambda: torch.cuda.stream(stream)

    def await_stream(self, stream: int) -> None:
        """Wait by an event."""
        # torch treats an external stream without a handle as a new stream of its pool, not as the default stream.
        other = (
            torch.cuda.ExternalStream(stream, device=self.ordinal)
            if stream
            else torch.cuda.default_stream(self.ordinal)
        )
        torch.cuda.current_stream(self.ordinal).wait_stream(other)

    def keep_for(self, tensor: Tensor) -> None:
        """Record the use in torch's allocator."""
        tensor.record_stream(torch.cuda.current_stream(self.ordinal))

    def over_buffer(self, buffer: Buffer) -> Tensor:
        """Wrap the memory by NumPy's array interface for CUDA."""
        place = torch.device("cuda", self.ordinal)
        return torch.as_tensor(_CudaMemory(buffer), device=place)


class _CudaMemory:
    """Registered memory in the form that torch imports; torch keeps this object as long as the storage."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.num_bytes,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 3,
            "strides": None,
        }
        self._ordinal = buffer.device

    def __del__(self) -> None:
        # Enqueued work may still use it, also for freed tensors. This is rare: an optimizer has one buffer.
        if not sys.is_finalizing():
            torch.cuda.synchronize(self._ordinal)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into equally many others, with one kernel per type if torch's CUDA has it."""
    if len({x.dtype for x in targets}) == len({x.dtype for x in sources}) == 1:
        _copy_alike(targets, sources)
        return
    # With several types torch would use the first type for all of them.
    by_types: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = by_types.setdefault((target.dtype, source.dtype), ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in by_types.values():
        _copy_alike(into, out_of)


def _copy_alike(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one type into equally many others of one type."""
    if _COPIED_ALONE.isdisjoint((targets[0].dtype, sources[0].dtype)):
        # If the strides of one pair differ, torch copies every tensor of the list separately.
        torch._foreach_copy_(list(targets), list(map(_as_strided, sources, targets)))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _as_strided(tensor: Tensor, like: Tensor) -> Tensor:
    """Give the tensor the strides of another one, if these describe the same memory.

    Strides of a dimension of one element do not matter, and cuDNN's gradients of 1 x 1 convolutions differ from the weights in these.
    """
    strides, wanted = tensor.stride(), like.stride()
    if strides == wanted:
        return tensor
    shape = tensor.shape
    if shape != like.shape or any(
        n != 1 and a != b for n, a, b in zip(shape, strides, wanted, strict=True)
    ):
        return tensor
    return tensor.as_strided(shape, wanted)


def refuse_capture() -> NoReturn:
    """Raise the error of a collective on a stream that is being captured into a graph."""
    raise InvalidArgumentError(
        "The current stream is being captured into a CUDA graph, and collectives need the other ranks, which a graph "
        "cannot wait for. Run backward and step outside of the capture; torch.cuda.make_graphed_callables captures a "
        "model so that its gradients arrive outside."
    )


class RankGpu(ContextPart):
    """GPU of this rank.

    Attributes:
        device: of the rank's first tensor on a GPU; None before it.
        opener: opens the device; None for `open_cuda`.
    """

    def __init__(self) -> None:
        self.device: Device | None = None
        self.opener: Callable[[Engine, int], Device] | None = None


def opened(ctx: Context, what: str, tensor: Tensor) -> Device:
    """The rank's device; its first tensor there opens it.

    Raises:
        InvalidArgumentError: the tensor is on another device, or a library or the device cannot be used.
    """
    ordinal = tensor.device.index if tensor.is_cuda else None
    device = ctx.part(RankGpu).device
    if device is not None and device.ordinal == ordinal:
        return device
    if ordinal is None:
        raise InvalidArgumentError(
            f"{what}: the tensor is on {tensor.device}, and sparkhvd moves tensors of the CPU and of NVIDIA's GPUs. "
            "Move it with .cpu() or .cuda()."
        )
    if device is not None:
        raise InvalidArgumentError(
            f"{what}: the tensor is on {tensor.device}, and this rank's operations run on cuda:{device.ordinal}, "
            f"which its first tensor chose. Move it there; torch.cuda.set_device({device.ordinal}) before anything is "
            "made keeps a rank on its own GPU."
        )
    return open_device(ctx, ordinal)


def open_device(ctx: Context, ordinal: int) -> Device:
    """Open the rank's device."""
    gpu = ctx.part(RankGpu)
    gpu.device = (gpu.opener or open_cuda)(ctx.engine, ordinal)
    return gpu.device


def open_cuda(engine: Engine, ordinal: int) -> Device:
    """Open a device of torch.cuda for an engine."""
    torch.cuda.init()
    library = engine.settings.nccl_library
    engine.open_device(
        ordinal,
        cuda_library=engine.settings.cuda_library or None,
        nccl_library=library or None,
        nccl_candidates=() if library else nccl_candidates(),
    )
    return CudaDevice(ordinal)


def nccl_candidates() -> list[str]:
    """List the copies of NCCL in installed packages, in torch's search order."""
    paths: list[str] = []
    for place in _PLACES:
        for entry in sys.path:
            path = Path(entry or ".") / place / _NCCL
            if path.is_file() and str(path) not in paths:
                paths.append(str(path))
    return paths


def find_nccl() -> str:
    """The NCCL library that the engine opens, for use outside of the engine."""
    return next(iter((*_loaded(_NCCL), *nccl_candidates())), _NCCL)


def _loaded(name: str) -> list[str]:
    """List the loaded libraries of this process with a name."""
    paths = [
        line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return list(dict.fromkeys(path[0] for path in paths if path and Path(path[0]).name == name))


def nccl_version() -> int:
    """The version code of torch's NCCL. 0 if this torch has no CUDA or no NCCL."""
    if torch.version.cuda is None:
        return 0
    try:
        major, minor, patch = torch.cuda.nccl.version()[:3]
    except (AttributeError, ValueError, TypeError):  # a build with CUDA and without NCCL
        return 0
    return int(major) * 10000 + int(minor) * 100 + int(patch)
