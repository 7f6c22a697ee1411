"""Bucket of dense gradients, reduced in place by one operation on a list of their memory.

A gradient that cannot be reduced in place (compressed, sparse, of another type, with unplanned strides) is copied. The
result is then copied back into the gradient, or replaces the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkhvd.engine.calls import Call, Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, ReduceOp
from sparkhvd.engine.work import Buffer
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import Operation, engine_dtype, paired
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.registered import over_buffer


class GradientBucket:
    """Base class of buckets of dense gradients, collected in each cycle.

    Args:
        name: name of the operation.
        entries: the parameters.
    """

    __slots__ = ("entries", "name", "pending", "sent", "work")

    def __init__(self, name: str, entries: list[GradientSlot]) -> None:
        self.name = name
        self.entries = entries
        self.pending = len(entries)
        self.work: Operation | None = None
        # Copies that were sent instead of gradients: (parameter, copy, compression's context).
        self.sent: list[tuple[GradientSlot, Tensor, Any]] = []
        for entry in entries:
            entry.bucket = self  # type: ignore[assignment]  # a subclass adds start() and wait()

    def take(self, entry: GradientSlot) -> None:
        """Take the gradient as it is, or zeros."""
        grad = entry.param.grad
        entry.grad = entry.make_zeros() if grad is None else grad

    def reset(self) -> None:
        """Get ready for the next cycle."""
        self.work = None
        self.sent.clear()
        self.pending = len(self.entries)
        for entry in self.entries:
            entry.grad = None
            entry.missing = False
            entry.stream = None


class DenseBucket(GradientBucket):
    """Bucket of gradients of one type, reduced in place.

    Args:
        name: name of the operation.
        entries: the parameters.
        flagged: whether to send a flag for each gradient that this rank has.
        options: options of the reducer.
        compression: compression of the gradients.
        flat: the memory of all gradients, if they are views of it.
        neighbours: returns all parameters whose gradients are reduced, by any optimizer.
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
        entries: list[GradientSlot],
        flagged: bool,
        options: ReduceOptions,
        compression: type[Compressor] | Compressor,
        flat: Tensor | None = None,
        neighbours: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        super().__init__(name, entries)
        wire = entries[0].wire_dtype
        real = paired((), wire)[1]
        shapes = [entry.shape for entry in entries] if flat is None else [(flat.numel(),)]
        shapes = [paired(shape, wire)[0] for shape in shapes]
        if flagged:
            # A flag per gradient and, if sparse gradients are sent dense, its number of sparse dimensions.
            shapes.append(((1 + options.sparse_as_dense) * len(entries),))
        self.call = Call(
            Collective.ALLREDUCE,
            shapes,
            engine_dtype(name, torch.empty(0, dtype=real)),
            Reduction(options.op, 1.0 / options.predivide, options.predivide),
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
            # Flags of a rank that has all gradients. The sums are read only if this rank lacks a gradient.
            self.ones = torch.ones(len(entries), dtype=real)
            if self._resparsify:
                self.ones = torch.cat([self.ones, torch.zeros_like(self.ones)])
            self.flags = torch.empty_like(self.ones)

    def start(self, engine: Engine) -> None:
        """Submit `grad` of every entry."""
        tensors = self.call.tensors
        keep: list[torch.UntypedStorage | Tensor] = []
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
                and not tensor.is_conj()
                and is_alone(memory := tensor.untyped_storage())
            ):
                entry.place = address = tensor.data_ptr()
            else:
                tensor = self._send_instead(entry, tensor)
                memory = tensor.untyped_storage()
                address = tensor.data_ptr()
            if address != entry.address:
                entry.address = address
                tensors[position].input = tensors[position].output = address
            keep.append(memory)  # `lend` explains why
        if self._flagged:
            has_gradient = self._flags()
            tensors[-1].input = has_gradient.data_ptr()
            tensors[-1].output = self.flags.data_ptr()
            # Do not keep the bucket itself: bucket -> work -> engine -> kept objects would be a reference cycle.
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

    def _send_instead(self, entry: GradientSlot, grad: Tensor) -> Tensor:
        """Copy a gradient that cannot or must not be sent in place.

        Returns the gradient itself if its memory differs from the plan in dimensions of length 1 only.
        """
        require_cpu(entry, grad)
        require_same_dtype(entry)
        require_same_shape(entry, grad)
        is_strided = grad.layout is torch.strided
        entry.place = grad.data_ptr() if is_strided else -1
        is_own = not is_strided or owns_memory(grad)
        is_plain = is_strided and not grad.is_neg() and not grad.is_conj()
        if self._plain and is_own and grad.dtype is entry.dtype and is_plain:
            strides = grad.stride()
            if all(
                ours == theirs or length == 1
                for ours, theirs, length in zip(strides, entry.stride, entry.shape, strict=True)
            ):
                # The same memory, because the stride of a dimension of length 1 is arbitrary.
                entry.stride = strides
                return grad
        dense = (
            grad.detach().resolve_conj().resolve_neg() if is_strided else grad.detach().to_dense()
        )
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
            release(entry, result, neighbours, resparsify=self._resparsify)


class ViewBucket(DenseBucket):
    """Bucket of gradients as views of flat registered memory, reduced in place."""

    __slots__ = ("_flat", "_memory", "_sparse_as_dense")

    def __init__(
        self,
        name: str,
        entries: list[GradientSlot],
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
        """Move every gradient to its slot and submit the memory."""
        for entry in self.entries:
            require_same_dtype(entry)
            require_same_shape(entry, entry.param)
            self._check_gradient(entry)
            entry.grad = self._memory.take(entry)
            entry.place = entry.grad.data_ptr()
        self.work = engine.start(self.call, self.name, self._flat)

    def _check_gradient(self, entry: GradientSlot) -> None:
        grad = entry.param.grad
        if grad is None:
            return
        require_same_shape(entry, grad)
        if grad.layout is not torch.strided and not self._sparse_as_dense:
            raise InvalidArgumentError(
                f"DistributedOptimizer: the gradient of {entry.name!r} is sparse, but gradient_as_bucket_view=True "
                "supports only dense gradients. Leave it out, or give sparse_as_dense=True."
            )


# ----------------------------------------------------------------------------------------------------
# Parameters with their gradients, the interface of buckets, and copies of results into `.grad`.


@dataclass(frozen=True)
class ReduceOptions:
    """Options of a reducer.

    Attributes:
        op: the reduction.
        predivide: divisor of every rank's gradient; the result is multiplied by it.
        compression: compression of the gradients.
        passes: backward passes per cycle; their gradients add up locally and are not divided.
        sparse_as_dense: send sparse gradients as dense ones.
        bucket_bytes: size of a full bucket.
        device_bucket_bytes: size of a full bucket on a GPU.
        groups: parameter numbers that share a bucket.
        process_set: the engine's number of the process set that reduces.
        ranks: global ranks of this process set, ascending.
        as_views: whether gradients are views of registered memory.
        sharded: whether every rank gets only its part of each gradient.
        wait_in_backward: whether the last backward pass of a cycle waits for the reduced gradients.
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
    """Parameters with gradients reduced as one operation, once per cycle.

    Attributes:
        name: name of the operation.
        entries: the parameters.
        pending: number of parameters without a complete gradient in this cycle.
        work: the operation, after its submission.
    """

    name: str
    entries: list[GradientSlot]
    pending: int
    work: Operation | None

    def start(self, engine: Engine) -> None:
        """Submit the operation. An entry's `grad` is None if `take` found no gradient."""

    def wait(self) -> None:
        """Wait until the reduced gradients lie in `.grad`."""

    def take(self, entry: GradientSlot) -> None:
        """Use a gradient from outside of the hook, or zeros without a gradient."""

    def reset(self) -> None:
        """Get ready for the next cycle."""


class UnusedParameters:
    """Placeholder bucket of parameters without a gradient on any rank. Never becomes complete."""

    pending = -1


class GradientSlot:
    """A parameter and its gradient in the running cycle."""

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
        self.sparse_dim = 0  # number of sparse dimensions; 0 for a dense gradient
        self.bucket: Bucket | UnusedParameters
        self.grad: Tensor | None = None  # the complete gradient of this cycle
        self.missing = False  # this rank has no gradient; zeros replace it
        self.address = -1  # address of the last submitted memory; the call is updated if it changes
        self.stream: int | None = None  # the GPU stream that completed the gradient
        self.place = -1  # address of the submitted gradient; -1 if it is sparse
        self.version = 0  # torch's version of the submitted gradient; changes in place increase it
        self.repeats = False  # the parameter gets several gradients in one backward pass

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense gradient when it is sent."""
        return self.param.numel() * self.wire_dtype.itemsize

    def forget_stride(self) -> None:
        """Plan row-major gradients, because the ranks' strides differ."""
        self.stride = torch.empty(self.shape, device="meta").stride()

    @property
    def is_changed(self) -> bool:
        """Whether `.grad` differs from the submitted gradient in tensor, address or values."""
        grad = self.param.grad
        if grad is not self.grad:
            return True
        if grad is None:
            return False
        return grad._version != self.version or (self.place >= 0 and grad.data_ptr() != self.place)

    def make_zeros(self) -> Tensor:
        """Replace this rank's missing gradient by zeros, and set `.grad` to them."""
        require_same_dtype(self)
        require_same_shape(self, self.param)
        # Create a new tensor, so that a change by a later backward pass is detected.
        grad = self.param.detach().new_empty_strided(self.shape, self.stride).zero_()
        self.param.grad = grad
        self.missing = True
        return grad


def _memory_layout(param: Tensor) -> tuple[int, ...]:
    """Compute autograd's strides for `param`'s gradient.

    They are the strides of `param` if its memory has no gaps.
    """
    return tuple(torch.empty_like(param, device="meta").stride())


def drop_unused(
    entries: Sequence[GradientSlot], flags: Sequence[float], *, resparsify: bool
) -> None:
    """Drop gradients missing on all ranks, and give gradients missing here the other ranks' layout.

    Args:
        entries: the parameters of a bucket, with results in `.grad`.
        flags: for each parameter the number of ranks with a gradient, times a constant factor. With `resparsify` then
            for each parameter the sum of the ranks' numbers of sparse dimensions, times the same factor.
        resparsify: whether sparse gradients were sent dense and must become sparse again.
    """
    for number, (entry, used) in enumerate(zip(entries, flags, strict=False)):
        if not entry.missing:
            continue
        if not used:
            entry.param.grad = None
        elif resparsify and (dimensions := flags[len(entries) + number]):
            # Convert to sparse as on the other ranks, because some optimizers support sparse gradients only.
            assert entry.param.grad is not None
            dense = entry.param.grad
            entry.param.grad = dense.to_sparse(round(dimensions / used))


def owns_memory(tensor: Tensor) -> bool:
    """Whether this tensor is the only user of its storage.

    Backward uses views as gradients: in `(p.view(-1) + q.view(-1)).backward()` both share the memory of one gradient,
    which backward may still read afterwards. The engine must not write memory of another tensor.
    """
    return is_alone(tensor.untyped_storage())


def is_alone(memory: torch.UntypedStorage) -> bool:
    """Whether at most one tensor uses this storage."""
    return bool(_use_count(memory._cdata) <= _ALONE)


_use_count = torch._C._storage_Use_Count


def _uses_of_one_tensor() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return int(_use_count(storage._cdata))


# Use count of a storage that one tensor uses, measured as `is_alone` measures it.
_ALONE = _uses_of_one_tensor()


def require_cpu(entry: GradientSlot, grad: Tensor) -> None:
    """Refuse gradients on other devices than the CPU."""
    if not grad.is_cpu:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} was on the CPU when the optimizer was built, but its gradient is on "
            f"{grad.device} now. Build DistributedOptimizer after moving the model."
        )


def require_same_place(entry: GradientSlot, grad: Tensor) -> None:
    """Refuse gradients on another device than the parameter."""
    if grad.device != entry.param.device:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} is on {entry.param.device}, but its gradient is on {grad.device}. Build "
            "DistributedOptimizer after moving the model."
        )


def require_same_dtype(entry: GradientSlot) -> None:
    """Refuse parameters with another type than planned, because the reduction would convert them."""
    if entry.param.dtype is not entry.dtype:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} was {entry.dtype} when the optimizer was built, but is "
            f"{entry.param.dtype} now. Build DistributedOptimizer after converting the model."
        )


def require_same_shape(entry: GradientSlot, tensor: Tensor) -> None:
    """Refuse a parameter or gradient of another shape, because the engine would access memory out of bounds."""
    if tensor.shape != entry.shape:
        whose = "it" if tensor is entry.param else "its gradient"
        raise InvalidArgumentError(
            f"DistributedOptimizer: {entry.name!r} had shape {entry.shape} when the optimizer was built, but "
            f"{whose} has {tuple(tensor.shape)} now. Build DistributedOptimizer after the model has its final shapes."
        )


def release(
    entry: GradientSlot, result: Tensor, neighbours: Neighbours, *, resparsify: bool
) -> None:
    """Copy a reduced gradient into `.grad`, or replace `.grad` if that is impossible."""
    grad = entry.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        dense = result.to(grad.dtype)
        entry.param.grad = dense.to_sparse(grad.sparse_dim()) if resparsify else dense
    elif _is_one_place_per_element(grad) and not neighbours.overlap(entry, grad):
        grad.detach().copy_(result)
    else:  # elements share memory, as in an expanded gradient
        entry.param.grad = result.to(grad.dtype)


class Neighbours:
    """Memory ranges of all optimizers' gradients, collected at the first query.

    Args:
        parameters: returns all reduced parameters.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._by_storage: dict[int, list[tuple[Tensor, int, int]]] | None = None

    def overlap(self, entry: GradientSlot, grad: Tensor) -> bool:
        """Whether another gradient overlaps this one's memory, such as another view of the same tensor."""
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
    """Compute the address of the first byte and the address after the last byte."""
    places = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (places + 1) * tensor.element_size()


def _is_one_place_per_element(grad: Tensor) -> bool:
    """True only if torch is certain that no two elements share memory."""
    return bool(torch._debug_has_internal_overlap(grad) == 0)


# ----------------------------------------------------------------------------------------------------
# Gradients as views of registered memory: `DistributedOptimizer(gradient_as_bucket_view=True)`.
# All gradients of a reducer are in one flat piece of registered memory, bucket after bucket. `p.grad` is a view of
# it, backward adds into it, and the ranks of a host reduce it in place, without copies. The cost: gradients must be set
# to zero, and backward must add to them instead of assigning its own tensors. This saves time only for programs that
# keep their gradients between steps anyway, so it is off by default. Measured with 64 MiB of Linear gradients and two
# ranks: gradients in private memory, dropped after each step 118 ms, kept and set to zero 155 ms; views 132 ms.

# Every gradient begins at a multiple of a cache line, for vector instructions and to avoid false sharing.
_ALIGNMENT = 64


class HasGradient(Protocol):
    """Attributes of a parameter for the memory of gradient views."""

    param: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(entry: HasGradient) -> int:
    return _aligned(entry.param.numel() * entry.dtype.itemsize)


def needed_bytes(entries: Sequence[HasGradient]) -> int:
    """Count the bytes for the gradients of these parameters, in any order."""
    return sum(_num_bytes(entry) for entry in entries)


class GradientMemory:
    """Flat memory with the gradients of parameters."""

    def __init__(self, buffer: Buffer) -> None:
        self._bytes = over_buffer(buffer, torch.uint8, buffer.num_bytes)
        # The `.grad` tensors, and tensors at their required addresses: `model.to(...)` replaces the memory of a
        # `.grad`.
        self._views: dict[int, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def lay_out(self, buckets: Sequence[Sequence[HasGradient]]) -> list[Tensor]:
        """Assign a slot to every parameter and move existing gradients there, and return the flat memory of each bucket."""
        moved = {key: view.clone() for key, view in self._views.items()}
        self._bytes.zero_()
        flats: list[Tensor] = []
        first = 0
        for entries in buckets:
            size = sum(_num_bytes(entry) for entry in entries)
            dtype = entries[0].dtype
            flat = self._bytes[first : first + size].view(dtype)
            offset = 0
            for entry in entries:
                # `.data` gives each view a version counter of its own.
                view = flat.as_strided(
                    entry.shape, entry.stride, flat.storage_offset() + offset // dtype.itemsize
                ).data
                self._put(entry, view, moved.get(id(entry)))
                offset += _num_bytes(entry)
            flats.append(flat)
            first += size
        return flats

    def _put(self, entry: HasGradient, view: Tensor, values: Tensor | None) -> None:
        old = self._views.get(id(entry))
        self._views[id(entry)] = view
        self._places[id(entry)] = view.detach()
        grad = entry.param.grad
        if values is not None:
            view.copy_(values)
        elif grad is not None and grad is not old:
            view.copy_(grad)
        entry.param.grad = view

    def take(self, entry: HasGradient) -> Tensor:
        """Move the gradient of a parameter from any place to its slot."""
        grad = entry.param.grad
        view = self._view(entry)
        if grad is view:
            return view
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad.detach() if grad.layout is torch.strided else grad.detach().to_dense())
        entry.param.grad = view
        return view

    def zero(self, entries: Sequence[HasGradient]) -> None:
        """Set all gradients to zero, in their slots."""
        self._bytes.zero_()
        for entry in entries:
            entry.param.grad = self._view(entry)

    def _view(self, entry: HasGradient) -> Tensor:
        """Return the tensor for `.grad`.

        It is a new tensor only if the memory of the old tensor was replaced.
        """
        view, place = self._views[id(entry)], self._places[id(entry)]
        if view.data_ptr() != place.data_ptr():
            view = self._views[id(entry)] = place.data
        return view
