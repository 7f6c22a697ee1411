"""Interface to CUDA through torch: streams, events, memory, and the path of NCCL. The import loads no CUDA.

All other modules use a `Device`, so that tests can run the same code on a stand-in. A rank has one device. The first
tensor on a GPU (or `join(device)`) opens it.

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

# Folders of NCCL in packages from pip, relative to the directories of `sys.path`.
_PLACES = ("nvidia/nccl/lib", "nvidia/cu13/lib", "nccl/lib")
_NCCL = "libnccl.so.2"
# torch's `_foreach_copy_` has no CUDA kernel for these types, so they are copied with `copy_`.
_COPIED_ALONE = frozenset((torch.uint16, torch.uint32, torch.uint64))


class Device(Protocol):
    """Interface to a GPU, for collectives.

    Attributes:
        ordinal: number of the GPU, the same in torch and in the driver.
    """

    ordinal: int

    def stream(self) -> int:
        """CUDA handle of this thread's current stream.

        Raises:
            InvalidArgumentError: the stream is being captured into a graph.
        """

    def raw_stream(self) -> int:
        """CUDA handle of the stream, without the check for capture. The submission makes that check."""

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        """Make a factory of context managers to use this thread's current stream in any thread."""

    def await_stream(self, stream: int) -> None:
        """Let the current stream wait for the pending work of another stream, given by its handle."""

    def keep_for(self, tensor: Tensor) -> None:
        """Keep a tensor's memory, also if it is shared, until the current stream's pending work has finished."""

    def over_buffer(self, buffer: Buffer) -> Tensor:
        """View registered memory as a tensor of bytes. Its storage keeps the buffer alive."""


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
        """Let the current stream wait for an event of the other stream."""
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
        """Import the memory into torch by `__cuda_array_interface__`."""
        place = torch.device("cuda", self.ordinal)
        return torch.as_tensor(_CudaMemory(buffer), device=place)


class _CudaMemory:
    """Registered memory for import by torch. torch keeps this object alive with the storage."""

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
        # Enqueued work may still use the memory. The wait is rare, because an optimizer has one buffer.
        if not sys.is_finalizing():
            torch.cuda.synchronize(self._ordinal)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, with one kernel per type where torch has such a kernel."""
    if len({x.dtype for x in targets}) == len({x.dtype for x in sources}) == 1:
        _copy_alike(targets, sources)
        return
    # Separate the types, because torch would treat all tensors of a list as having the type of the first.
    by_types: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = by_types.setdefault((target.dtype, source.dtype), ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in by_types.values():
        _copy_alike(into, out_of)


def _copy_alike(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target.

    All sources have one type, and all targets have one type.
    """
    if _COPIED_ALONE.isdisjoint((targets[0].dtype, sources[0].dtype)):
        # Make the strides equal: if those of one pair differed, torch would copy every tensor of the list separately.
        torch._foreach_copy_(list(targets), list(map(_as_strided, sources, targets)))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _as_strided(tensor: Tensor, like: Tensor) -> Tensor:
    """Give the tensor the strides of `like`, if they describe the same memory.

    The stride of a dimension of one element is arbitrary. cuDNN's gradients of 1 x 1 convolutions have other strides
    than the weights in these dimensions.
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
    """Raise the error of a collective on a stream during graph capture."""
    raise InvalidArgumentError(
        "The current stream is being captured into a CUDA graph, but a graph cannot wait for other ranks, as "
        "collectives must. Run backward and step outside of the capture; torch.cuda.make_graphed_callables captures a "
        "model so that its gradients arrive outside of the graph."
    )


class RankGpu(ContextPart):
    """The GPU of this rank's operations.

    Attributes:
        device: the GPU of the rank's first GPU tensor; None before this tensor.
        opener: function that opens the device; None for `open_cuda`.
    """

    def __init__(self) -> None:
        self.device: Device | None = None
        self.opener: Callable[[Engine, int], Device] | None = None


def opened(ctx: Context, what: str, tensor: Tensor) -> Device:
    """Return the rank's device, opened by the rank's first GPU tensor.

    Raises:
        InvalidArgumentError: the tensor is on another device, or a library or the device cannot be used.
    """
    ordinal = tensor.device.index if tensor.is_cuda else None
    device = ctx.part(RankGpu).device
    if device is not None and device.ordinal == ordinal:
        return device
    if ordinal is None:
        raise InvalidArgumentError(
            f"{what}: the tensor is on {tensor.device}, but sparkhvd supports only the CPU and NVIDIA GPUs. "
            "Move it with .cpu() or .cuda()."
        )
    if device is not None:
        raise InvalidArgumentError(
            f"{what}: the tensor is on {tensor.device}, but this rank uses cuda:{device.ordinal}, the GPU of its first "
            f"GPU tensor. Move the tensor to cuda:{device.ordinal}. To keep a rank on its own GPU, call "
            f"torch.cuda.set_device({device.ordinal}) before you create tensors."
        )
    return open_device(ctx, ordinal)


def open_device(ctx: Context, ordinal: int) -> Device:
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
    """Find the engine's NCCL library, for use outside of the engine."""
    return next(iter((*_loaded(_NCCL), *nccl_candidates())), _NCCL)


def _loaded(name: str) -> list[str]:
    """List the paths of this process's loaded libraries of that name."""
    paths = [
        line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return list(dict.fromkeys(path[0] for path in paths if path and Path(path[0]).name == name))


def nccl_version() -> int:
    """Read the version code of torch's NCCL, or 0 if this torch has no CUDA or no NCCL."""
    if torch.version.cuda is None:
        return 0
    try:
        major, minor, patch = torch.cuda.nccl.version()[:3]
    except (AttributeError, ValueError, TypeError):  # a build with CUDA and without NCCL
        return 0
    return int(major) * 10000 + int(minor) * 100 + int(patch)
