"""Bucket of dense gradients: a gather list over their own memory, reduced as one operation and in place.

A gradient that cannot be reduced where it lies (compressed, sparse, of another type, with strides that the plan does not
have) is copied, and the result goes back into the gradient, or takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine.engine import Call, Collective, Engine, Reduction
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.collectives.tensors import engine_dtype, paired
from sparkhvd.torch.compressors import Compressor, NoneCompressor
from sparkhvd.torch.gradients.entry import (
    Entry,
    Neighbours,
    ReduceOptions,
    drop_unused,
    give_back,
    is_alone,
    owns_memory,
    require_cpu,
    require_same_dtype,
    require_same_shape,
)
from sparkhvd.torch.gradients.registered_views import GradientMemory

__all__ = [
    "DenseBucket",
    "GradientBucket",
    "ViewBucket",
]


class GradientBucket:
    """Base of the buckets of dense gradients: takes gradients, one cycle after the other.

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
        # Copies that were sent instead of gradients: (parameter, copy, compression's context).
        self.sent: list[tuple[Entry, Tensor, Any]] = []
        for entry in entries:
            entry.bucket = self  # type: ignore[assignment]  # a subclass adds start() and wait()

    def take(self, entry: Entry) -> None:
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
    """Bucket of gradients of one type, reduced where they lie.

    Args:
        name: of the operation.
        entries: the parameters.
        flagged: send a flag for each gradient that this rank has.
        options: of the reducer.
        compression: of the gradients.
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
        entries: list[Entry],
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
            # A flag per gradient and, where sparse ones are sent as dense, in how many dimensions it is sparse.
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
            # Flags of a rank that has all gradients; the sums are read only if one is missing here.
            self.ones = torch.ones(len(entries), dtype=real)
            if self._resparsify:
                self.ones = torch.cat([self.ones, torch.zeros_like(self.ones)])
            self.flags = torch.empty_like(self.ones)

    def start(self, engine: Engine) -> None:
        """Submit the gradients of all entries, which `grad` has."""
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
            keep.append(memory)  # as `lend`
        if self._flagged:
            has_gradient = self._flags()
            tensors[-1].input = has_gradient.data_ptr()
            tensors[-1].output = self.flags.data_ptr()
            # Not the bucket itself: it holds the work, and the work the engine, which holds the kept objects.
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
        """Return the copy to send for a gradient that cannot be, or shall not be, sent from where it lies."""
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
                # The same memory: the stride of a dimension of length 1 is arbitrary.
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
            give_back(entry, result, neighbours, resparsify=self._resparsify)


class ViewBucket(DenseBucket):
    """Bucket of gradients that are views of flat registered memory, reduced there."""

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
