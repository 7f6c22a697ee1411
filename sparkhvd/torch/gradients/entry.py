"""Parameter whose gradients are reduced, the protocol of its bucket, and the way of results back into `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparkhvd.engine.engine import Engine, ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.compressors import Compressor

__all__ = [
    "Bucket",
    "Entry",
    "Neighbours",
    "Parked",
    "ReduceOptions",
    "drop_unused",
    "give_back",
    "is_alone",
    "owns_memory",
    "require_cpu",
    "require_same_dtype",
    "require_same_place",
    "require_same_shape",
]


@dataclass(frozen=True)
class ReduceOptions:
    """Options of a reducer.

    Attributes:
        op: the reduction.
        predivide: divisor of every rank's gradient; the result is multiplied by it.
        compression: of the gradients.
        passes: backward passes per cycle; their gradients add up locally and are not divided.
        sparse_as_dense: send sparse gradients as dense ones.
        bucket_bytes: size of a full bucket.
        device_bucket_bytes: size of a full bucket on a GPU.
        groups: parameter numbers that share a bucket.
        process_set: the engine's number of the ranks that reduce.
        ranks: their global ranks, ascending.
        as_views: gradients live in registered memory.
        sharded: every rank gets its part of each gradient.
        wait_in_backward: the end of the last backward pass waits for the reduced gradients.
    """

    op: ReduceOp
    predivide: float
    compression: type[Compressor] | Compressor
    passes: int
    sparse_as_dense: bool
    bucket_bytes: int
    device_bucket_bytes: int = 32 << 20
    groups: tuple[tuple[int, ...], ...] = ()
    process_set: int = 0
    ranks: tuple[int, ...] = ()
    as_views: bool = False
    sharded: bool = False
    wait_in_backward: bool = True


class Bucket(Protocol):
    """Parameters whose gradients are reduced as one operation, once per cycle.

    Attributes:
        name: of the operation.
        entries: the parameters.
        pending: number of parameters without a complete gradient in this cycle.
        work: the operation, once it was submitted.
    """

    name: str
    entries: list[Entry]
    pending: int
    work: Operation | None

    def start(self, engine: Engine) -> None:
        """Submit the operation; an entry's `grad` is None where `take` found none."""

    def wait(self) -> None:
        """Wait until the reduced gradients lie in `.grad`."""

    def take(self, entry: Entry) -> None:
        """Take a gradient that came without a hook, or zeros in its place."""

    def reset(self) -> None:
        """Get ready for the next cycle."""


class Parked:
    """Place of the parameters that no rank has given a gradient yet, in no bucket; never complete."""

    pending = -1


class Entry:
    """Parameter with the gradient of the running cycle."""

    __slots__ = (
        "address",
        "bucket",
        "dtype",
        "grad",
        "index",
        "missing",
        "name",
        "param",
        "place",
        "repeats",
        "shape",
        "sparse_dim",
        "stream",
        "stride",
        "version",
        "wire_dtype",
    )

    def __init__(self, index: int, name: str, param: Tensor, wire_dtype: torch.dtype) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.shape = tuple(param.shape)
        self.stride: tuple[int, ...] = _memory_layout(param)
        self.dtype = param.dtype
        self.wire_dtype = wire_dtype
        self.sparse_dim = 0  # dimensions that are indices; 0 = the gradient is dense
        self.bucket: Bucket | Parked
        self.grad: Tensor | None = None  # this cycle's gradient, once it is complete
        self.missing = False  # this rank's gradient is missing; zeros are in its place
        self.address = -1  # of what was sent last; the call is told when it changes
        self.stream: int | None = None  # of the GPU, on which the gradient became complete
        self.place = -1  # where the gradient lay when it was submitted; -1 of a sparse one
        self.version = 0  # of the gradient when it was submitted; changes in place move it
        self.repeats = False  # gets several gradients in one backward pass

    @property
    def num_bytes(self) -> int:
        """Length of the dense gradient as it is sent."""
        return self.param.numel() * self.wire_dtype.itemsize

    def forget_stride(self) -> None:
        """Send row-major gradients: other ranks have other strides."""
        self.stride = torch.empty(self.shape, device="meta").stride()

    @property
    def is_changed(self) -> bool:
        """Return True if `.grad` is another tensor, lies elsewhere, or has other values than the submitted gradient."""
        grad = self.param.grad
        if grad is not self.grad:
            return True
        if grad is None:
            return False
        return grad._version != self.version or (self.place >= 0 and grad.data_ptr() != self.place)

    def make_zeros(self) -> Tensor:
        """Make zeros in place of a gradient that this rank does not have, also as `.grad`."""
        require_same_dtype(self)
        require_same_shape(self, self.param)
        # The optimizer's own tensor, so that a later backward pass is noticed.
        grad = self.param.detach().new_empty_strided(self.shape, self.stride).zero_()
        self.param.grad = grad
        self.missing = True
        return grad


def _memory_layout(param: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives to the gradient of `param`: its own if its memory has no holes."""
    return tuple(torch.empty_like(param, device="meta").stride())


def drop_unused(entries: Sequence[Entry], flags: Sequence[float], *, resparsify: bool) -> None:
    """Give gradients that are missing here the layout that they have on other ranks, or drop them if no rank has one.

    Args:
        entries: the parameters of a bucket, whose results lie in `.grad`.
        flags: for each the number of ranks that have a gradient, times any number; with `resparsify` then for each the number of
            dimensions in which their gradients are sparse, added up, times the same number.
        resparsify: whether sparse gradients were sent as dense ones, and shall be sparse again.
    """
    for number, (entry, used) in enumerate(zip(entries, flags, strict=False)):
        if not entry.missing:
            continue
        if not used:
            entry.param.grad = None
        elif resparsify and (dimensions := flags[len(entries) + number]):
            # As on the ranks that have one: some optimizers take sparse gradients only.
            assert entry.param.grad is not None
            dense = entry.param.grad
            entry.param.grad = dense.to_sparse(round(dimensions / used))


def owns_memory(tensor: Tensor) -> bool:
    """Return True if no other tensor has this one's storage.

    Backward takes views for gradients: `(p.view(-1) + q.view(-1)).backward()` gives both the memory of one gradient,
    which backward may still read afterwards. The engine must write no memory of another tensor.
    """
    return is_alone(tensor.untyped_storage())


def is_alone(memory: torch.UntypedStorage) -> bool:
    """Return True if at most one tensor has this memory; the object `memory` is the same in all calls and does not count."""
    return bool(_use_count(memory._cdata) <= _ALONE)


_use_count = torch._C._storage_Use_Count


def _uses_of_one_tensor() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return int(_use_count(storage._cdata))


# Of a storage that one tensor has, while this module looks at it.
_ALONE = _uses_of_one_tensor()


def require_cpu(entry: Entry, grad: Tensor) -> None:
    """Refuse gradients on another device."""
    if not grad.is_cpu:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} was on the CPU when the optimizer was built, and its gradient is on "
            f"{grad.device} now. Build DistributedOptimizer after the model is where it stays."
        )


def require_same_place(entry: Entry, grad: Tensor) -> None:
    """Refuse gradients that are not where the parameter is."""
    if grad.device != entry.param.device:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} is on {entry.param.device} and its gradient on {grad.device}. Build "
            "DistributedOptimizer after the model is where it stays."
        )


def require_same_dtype(entry: Entry) -> None:
    """Refuse parameters whose type is not the planned one: it would be lost on the way."""
    if entry.param.dtype is not entry.dtype:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} was {entry.dtype} when the optimizer was built, and is "
            f"{entry.param.dtype} now. Build DistributedOptimizer after the model has its type."
        )


def require_same_shape(entry: Entry, tensor: Tensor) -> None:
    """Refuse a parameter or gradient whose shape is not the planned one: the engine would read and write beside it."""
    if tensor.shape != entry.shape:
        whose = "it" if tensor is entry.param else "its gradient"
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} had shape {entry.shape} when the optimizer was built, and "
            f"{whose} has {tuple(tensor.shape)} now. Build DistributedOptimizer after the model has its shape."
        )


def give_back(entry: Entry, result: Tensor, neighbours: Neighbours, *, resparsify: bool) -> None:
    """Put a reduced gradient into `.grad`, or in its place where that cannot take it."""
    grad = entry.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        dense = result.to(grad.dtype)
        entry.param.grad = dense.to_sparse(grad.sparse_dim()) if resparsify else dense
    elif _is_one_place_per_element(grad) and not neighbours.overlap(entry, grad):
        grad.detach().copy_(result)
    else:  # an expanded gradient, for one: its elements share memory
        entry.param.grad = result.to(grad.dtype)


class Neighbours:
    """Memory of the gradients of all optimizers; looked up at the first question.

    Args:
        parameters: returns all parameters whose gradients are reduced.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._by_storage: dict[int, list[tuple[Tensor, int, int]]] | None = None

    def overlap(self, entry: Entry, grad: Tensor) -> bool:
        """Return True if another gradient has some of this one's memory, as those that backward made of one tensor."""
        if owns_memory(grad):
            return False
        first, last = _span(grad)
        return any(
            param is not entry.param and begin < last and first < end
            for param, begin, end in self._in_storage(grad.untyped_storage()._cdata)
        )

    def _in_storage(self, storage: int) -> list[tuple[Tensor, int, int]]:
        if self._by_storage is None:
            self._by_storage = {}
            for param in self._parameters():
                grad = param.grad
                if grad is not None and grad.layout is torch.strided:
                    spans = self._by_storage.setdefault(grad.untyped_storage()._cdata, [])
                    spans.append((param, *_span(grad)))
        return self._by_storage.get(storage, [])


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one behind the last."""
    places = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (places + 1) * tensor.element_size()


def _is_one_place_per_element(grad: Tensor) -> bool:
    """Return True if surely no two elements share memory."""
    return bool(torch._debug_has_internal_overlap(grad) == 0)
