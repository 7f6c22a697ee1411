"""One bucket of dense gradients: a gather list over their own memory, reduced as one operation and in place.

What cannot be reduced where it lies (compressed, sparse, of another type, with strides that the plan does not
have) is copied, and the result goes back into the gradient, or takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkhvd.engine.engine import Engine, ReduceOp, allreduce_call
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.collectives.tensors import engine_dtype
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.gradients.registered_views import GradientMemory

__all__ = [
    "Bucket",
    "DenseBucket",
    "Entry",
    "GradientBucket",
    "Neighbours",
    "Parked",
    "ReduceOptions",
    "ViewBucket",
    "drop_unused",
    "give_back",
    "owns_memory",
    "require_cpu",
    "require_same_place",
    "require_same_shape",
]


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are reduced.

    Attributes:
        op: the reduction.
        predivide: what every rank's gradient is divided by; the result is multiplied by it.
        compression: what is sent in place of the gradients.
        passes: backward passes per cycle; their gradients add up locally and are not divided.
        sparse_as_dense: send sparse gradients as dense ones.
        bucket_bytes: when a bucket is full.
        device_bucket_bytes: the same of one on a GPU.
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
        pending: how many have no complete gradient yet in this cycle.
        work: the operation, once it was submitted.
    """

    name: str
    entries: list[Entry]
    pending: int
    work: Operation | None

    def start(self, engine: Engine) -> None:
        """Submit; an entry's `grad` is None where `take` found none."""

    def wait(self) -> None:
        """Wait until the reduced gradients lie in `.grad`."""

    def take(self, entry: Entry) -> None:
        """Find a gradient that came without a hook, or what stands in for it."""

    def reset(self) -> None:
        """The cycle has ended."""


class Parked:
    """Where the parameters are of which it is not known yet how to reduce them; never complete."""

    pending = -1


class Entry:
    """One parameter."""

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
        self.missing = False  # this rank's gradient is a stand-in of zeros
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
        """Other ranks have other strides: what is sent is row-major."""
        self.stride = torch.empty(self.shape, device="meta").stride()

    @property
    def is_changed(self) -> bool:
        """Whether `.grad` is another tensor, lies elsewhere, or has other values than what was submitted."""
        grad = self.param.grad
        if grad is not self.grad:
            return True
        if grad is None:
            return False
        return grad._version != self.version or (self.place >= 0 and grad.data_ptr() != self.place)

    def stand_in(self) -> Tensor:
        """Zeros in place of a gradient that this rank does not have, also as `.grad`."""
        require_same_dtype(self)
        require_same_shape(self, self.param)
        # The optimizer's own tensor, so that a later backward pass is noticed.
        grad = self.param.detach().new_empty_strided(self.shape, self.stride).zero_()
        self.param.grad = grad
        self.missing = True
        return grad


def _memory_layout(param: Tensor) -> tuple[int, ...]:
    """The strides that autograd gives to the gradient of `param`: its own if its memory has no holes."""
    return tuple(torch.empty_like(param, device="meta").stride())


class GradientBucket:
    """What buckets of dense gradients have in common: one cycle after the other.

    Args:
        name: of the operation.
        entries: the parameters.
    """

    __slots__ = ("entries", "name", "pending", "sent", "work")

    def __init__(self, name: str, entries: list[Entry]) -> None:
        self.name = name
        self.entries = entries
        self.pending = len(entries)
        self.work: Operation | None = None
        # What was sent instead of the gradient itself: (gradient, what was sent, compression's context).
        self.sent: list[tuple[Entry, Tensor, Any]] = []
        for entry in entries:
            entry.bucket = self  # type: ignore[assignment]  # a subclass adds start() and wait()

    def take(self, entry: Entry) -> None:
        """The gradient as it is, or zeros."""
        grad = entry.param.grad
        entry.grad = entry.stand_in() if grad is None else grad

    def reset(self) -> None:
        """Ready for the next cycle."""
        self.work = None
        self.sent.clear()
        self.pending = len(self.entries)
        for entry in self.entries:
            entry.grad = None
            entry.missing = False
            entry.stream = None


class DenseBucket(GradientBucket):
    """Gradients of one type, reduced where they lie.

    Args:
        name: of the operation.
        entries: the parameters.
        flagged: whether who has a gradient at all travels along.
        options: how to reduce.
        compression: what is sent instead.
        flat: the memory of all gradients, if they are views of it.
        neighbours: all parameters whose gradients are reduced, by whichever optimizer.
    """

    __slots__ = (
        "_compression",
        "_flagged",
        "_neighbours",
        "_plain",
        "_resparsify",
        "call",
        "flags",
        "ones",
    )

    def __init__(
        self,
        name: str,
        entries: list[Entry],
        flagged: bool,
        options: ReduceOptions,
        compression: type[Compressor] | Compressor,
        flat: Tensor | None = None,
        neighbours: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        super().__init__(name, entries)
        dtype = engine_dtype(name, torch.empty(0, dtype=entries[0].wire_dtype))
        shapes = [entry.shape for entry in entries]
        if flat is not None:
            shapes = [(flat.numel(),)]
        if flagged:
            # Who has a gradient and, where sparse ones are sent as dense, in how many dimensions it is sparse.
            shapes.append(((1 + options.sparse_as_dense) * len(entries),))
        self.call = allreduce_call(
            shapes,
            dtype,
            options.op,
            1.0 / options.predivide,
            options.predivide,
            options.process_set,
        )
        self._neighbours = neighbours
        self._compression = compression
        self._plain = compression is NoneCompressor
        self._resparsify = options.sparse_as_dense
        for entry in entries:
            entry.address = -1
        self._flagged = flagged
        if flagged:
            # Who has a gradient: ones go in as they are, and are read only if a gradient is missing here.
            self.ones = torch.ones(len(entries), dtype=entries[0].wire_dtype)
            if self._resparsify:
                self.ones = torch.cat([self.ones, torch.zeros_like(self.ones)])
            self.flags = torch.empty_like(self.ones)

    def start(self, engine: Engine) -> None:
        """Submit the gradients of all entries, which `grad` has."""
        tensors = self.call.tensors
        keep: list[Any] = []
        plain = self._plain
        for position, entry in enumerate(self.entries):
            tensor = entry.grad
            assert tensor is not None
            if (
                plain
                and tensor.is_cpu
                and tensor.dtype is entry.dtype
                and tensor.layout is torch.strided
                and tensor.shape == entry.shape
                and tensor.stride() == entry.stride
                and not tensor.is_neg()
                and _is_alone(memory := tensor.untyped_storage())
            ):
                entry.place = address = tensor.data_ptr()
            else:
                tensor = self._send_instead(entry, tensor)
                memory = tensor.untyped_storage()
                address = tensor.data_ptr()
            if address != entry.address:
                entry.address = address
                tensors[position].input = tensors[position].output = address
            keep.append(memory)  # as `lend`
        if self._flagged:
            has_gradient = self._flags()
            tensors[-1].input = has_gradient.data_ptr()
            tensors[-1].output = self.flags.data_ptr()
            # Not the bucket itself: it holds the work, and the work the engine, which holds what is kept.
            keep += (has_gradient, self.flags)
        self.work = engine.start(self.call, self.name, keep)

    def wait(self) -> None:
        """Wait until the reduced gradients lie in `.grad`."""
        assert self.work is not None
        self.work.wait()
        if self.sent:
            self._take_back()
        if self._flagged and any([entry.missing for entry in self.entries]):
            drop_unused(self.entries, self.flags.tolist(), resparsify=self._resparsify)

    def _flags(self) -> Tensor:
        if not (self._resparsify or any([entry.missing for entry in self.entries])):
            return self.ones
        flags = [float(not entry.missing) for entry in self.entries]
        if self._resparsify:
            for entry in self.entries:
                grad = entry.grad
                is_sparse = grad is not None and grad.layout is not torch.strided
                flags.append(float(grad.sparse_dim()) if grad is not None and is_sparse else 0.0)
        return torch.tensor(flags, dtype=self.ones.dtype)

    def _send_instead(self, entry: Entry, grad: Tensor) -> Tensor:
        """What to send for a gradient that cannot be, or shall not be, sent from where it lies."""
        require_cpu(entry, grad)
        require_same_dtype(entry)
        require_same_shape(entry, grad)
        is_strided = grad.layout is torch.strided
        entry.place = grad.data_ptr() if is_strided else -1
        is_own = not is_strided or owns_memory(grad)
        is_neg = is_strided and grad.is_neg()
        if self._plain and is_own and grad.dtype is entry.dtype and is_strided and not is_neg:
            strides = grad.stride()
            if all(
                ours == theirs or length == 1
                for ours, theirs, length in zip(strides, entry.stride, entry.shape, strict=True)
            ):
                # The same memory: the stride of a dimension of length 1 is arbitrary.
                entry.stride = strides
                return grad
        dense = grad.detach().resolve_neg() if is_strided else grad.detach().to_dense()
        wire, compression_context = self._compression.compress(dense)
        is_shared = not is_own and wire.data_ptr() == grad.data_ptr()
        if is_shared or wire.dtype != entry.wire_dtype or wire.stride() != entry.stride:
            copy = torch.empty_strided(entry.shape, entry.stride, dtype=entry.wire_dtype)
            wire = copy.copy_(wire)
        self.sent.append((entry, wire, compression_context))
        return wire

    def _take_back(self) -> None:
        neighbours = Neighbours(self._neighbours)
        for entry, wire, compression_context in self.sent:
            result = self._compression.decompress(wire, compression_context)
            give_back(entry, result, neighbours, resparsify=self._resparsify)


def drop_unused(entries: Sequence[Entry], flags: Sequence[float], *, resparsify: bool) -> None:
    """Let stand-ins of zeros be what they are on the ranks that have a gradient, or nothing if no rank has one.

    Args:
        entries: the parameters of a bucket, whose results lie in `.grad`.
        flags: of each how many ranks have a gradient, times any number; with `resparsify` then of each in how many
            dimensions their gradients are sparse, added up, times the same number.
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
            dense: Any = entry.param.grad
            entry.param.grad = dense.to_sparse(round(dimensions / used))


def owns_memory(tensor: Tensor) -> bool:
    """Whether no other tensor has this one's storage.

    Backward takes views for gradients: `(p.view(-1) + q.view(-1)).backward()` gives both the memory of one gradient,
    which backward may still read afterwards. What the engine writes must be nobody else's.
    """
    return _is_alone(tensor.untyped_storage())


def _is_alone(memory: torch.UntypedStorage) -> bool:
    """Whether at most one tensor has this memory; `memory` itself, which is one object for all who ask, counts not."""
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


def require_same_shape(entry: Entry, found: Tensor) -> None:
    """Refuse a parameter or gradient whose shape is not the planned one: the engine would read and write beside it."""
    if found.shape != entry.shape:
        whose = "it" if found is entry.param else "its gradient"
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} had shape {entry.shape} when the optimizer was built, and "
            f"{whose} has {tuple(found.shape)} now. Build DistributedOptimizer after the model has its shape."
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
    """Where the gradients of all optimizers lie; looked up once, and only if somebody asks.

    Args:
        parameters: gives all parameters whose gradients are reduced.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._by_storage: dict[int, list[tuple[Tensor, int, int]]] | None = None

    def overlap(self, entry: Entry, grad: Tensor) -> bool:
        """Whether another gradient has some of this one's memory, as those that backward made of one tensor."""
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
                    found = self._by_storage.setdefault(grad.untyped_storage()._cdata, [])
                    found.append((param, *_span(grad)))
        return self._by_storage.get(storage, [])


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last."""
    places = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (places + 1) * tensor.element_size()


def _is_one_place_per_element(grad: Tensor) -> bool:
    """Whether no two elements surely or possibly share memory."""
    return bool(torch._debug_has_internal_overlap(grad) == 0)


class ViewBucket(DenseBucket):
    """Gradients that are views of one flat registered memory, reduced there."""

    __slots__ = ("_flat", "_memory", "_sparse_as_dense")

    def __init__(
        self,
        name: str,
        entries: list[Entry],
        options: ReduceOptions,
        memory: GradientMemory,
        flat: Tensor,
    ) -> None:
        super().__init__(name, entries, False, options, options.compression, flat)
        self._flat = flat
        self._memory = memory
        self._sparse_as_dense = options.sparse_as_dense
        self.call.place(0, flat.data_ptr(), flat.data_ptr())

    def start(self, engine: Engine) -> None:
        """Bring every gradient to its place and submit the memory."""
        for entry in self.entries:
            require_same_dtype(entry)
            require_same_shape(entry, entry.param)
            self._check_gradient(entry)
            entry.grad = self._memory.take(entry)
            entry.place = entry.grad.data_ptr()
        self.work = engine.start(self.call, self.name, self._flat)

    def _check_gradient(self, entry: Entry) -> None:
        grad = entry.param.grad
        if grad is None:
            return
        require_same_shape(entry, grad)
        if grad.layout is not torch.strided and not self._sparse_as_dense:
            raise InvalidArgumentError(
                f"DistributedOptimizer: the gradient of {entry.name!r} is sparse, and gradients that are views "
                "(gradient_as_bucket_view=True) are dense. Leave that out, or give sparse_as_dense=True."
            )
