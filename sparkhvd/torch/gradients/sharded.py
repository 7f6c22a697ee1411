"""Bucket of gradients for each rank's part of the sums: a reducescatter in place."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkhvd.engine.calls import Call, Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.tensors import engine_dtype, paired
from sparkhvd.torch.compressors import NoneCompressor
from sparkhvd.torch.gradients.dense import (
    GradientBucket,
    GradientSlot,
    ReduceOptions,
    drop_unused,
    owns_memory,
    require_cpu,
    require_same_shape,
)
from sparkhvd.torch.gradients.layout import cut_range, flat, same_places


class ShardedBucket(GradientBucket):
    """Bucket to reduce only this rank's part of gradients of one type. Other parts are undefined.

    Args:
        name: name of the operation.
        entries: the parameters.
        flagged: whether to send a flag for each gradient that this rank has.
        options: options of the reducer.
        place: this rank's index among the reducing ranks.
    """

    __slots__ = (
        "_compression",
        "_flags",
        "_num_ranks",
        "_ones",
        "_ranges",
        "_sparse_as_dense",
        "call",
    )

    def __init__(
        self,
        name: str,
        entries: list[GradientSlot],
        flagged: bool,
        options: ReduceOptions,
        place: int,
    ) -> None:
        super().__init__(name, entries)
        self._compression = options.compression
        self._sparse_as_dense = options.sparse_as_dense
        self._num_ranks = len(options.ranks)
        counts = [entry.param.numel() for entry in entries]
        self._ranges = [cut_range(count, self._num_ranks, place) for count in counts]
        wire = torch.empty(0, dtype=paired((), entries[0].wire_dtype)[1])
        # One row of flags per rank, because every rank needs the sums of all flags from the reducescatter.
        self._ones = (
            torch.ones(self._num_ranks, len(entries), dtype=wire.dtype) if flagged else None
        )
        self._flags = torch.empty(len(entries), dtype=wire.dtype)
        shapes = [paired((count,), entries[0].wire_dtype)[0] for count in counts]
        if flagged:
            shapes.append((self._num_ranks, len(entries)))
        self.call = Call(
            Collective.REDUCESCATTER,
            shapes,
            engine_dtype(name, wire),
            Reduction(options.op, 1.0 / options.predivide, options.predivide),
            options.process_set,
        )

    def start(self, engine: Engine) -> None:
        """Submit `grad` of every entry."""
        keep: list[torch.UntypedStorage | Tensor] = []
        for position, entry in enumerate(self.entries):
            tensor = self._to_send(entry)
            address = tensor.data_ptr()
            first = self._ranges[position][0]
            self.call.place(position, address, address + first * tensor.element_size())
            keep.append(tensor.untyped_storage())  # `lend` explains why
        if self._ones is not None:
            has_gradient = self._flags_of(self._ones)
            self.call.place(len(keep), has_gradient.data_ptr(), self._flags.data_ptr())
            keep += (has_gradient, self._flags)
        self.work = engine.start(self.call, self.name, keep)

    def wait(self) -> None:
        """Wait until this rank's part of every gradient is reduced."""
        assert self.work is not None
        self.work.wait()
        ranges = dict(zip(map(id, self.entries), self._ranges, strict=True)) if self.sent else {}
        for entry, wire, compression_context in self.sent:
            first, last = ranges[id(entry)]
            assert entry.grad is not None
            result = self._compression.decompress(flat(wire)[first:last], compression_context)
            flat(entry.grad)[first:last].copy_(result)
        if self._ones is not None and any([entry.missing for entry in self.entries]):
            drop_unused(self.entries, self._flags.tolist(), resparsify=False)

    def _flags_of(self, ones: Tensor) -> Tensor:
        if not any([entry.missing for entry in self.entries]):
            return ones
        row = torch.tensor([not entry.missing for entry in self.entries], dtype=ones.dtype)
        return row.repeat(self._num_ranks, 1)

    def _to_send(self, entry: GradientSlot) -> Tensor:
        grad = entry.grad
        assert grad is not None
        if not (
            grad.is_cpu
            and grad.dtype is entry.dtype
            and grad.layout is torch.strided
            and grad.shape == entry.shape
            and same_places(entry.stride, grad)
            and not grad.is_neg()
            and not grad.is_conj()
            and owns_memory(grad)
        ):
            grad = self._laid_out(entry, grad)
        entry.place = grad.data_ptr()
        if self._compression is NoneCompressor:
            return grad
        wire, compression_context = self._compression.compress(grad.detach())
        if wire is not grad:
            self.sent.append((entry, wire, compression_context))
        return wire

    def _laid_out(self, entry: GradientSlot, grad: Tensor) -> Tensor:
        """Copy the gradient into the memory layout of its parameter. The copy becomes `.grad`."""
        require_cpu(entry, grad)
        require_same_shape(entry, grad)
        if grad.layout is not torch.strided and not self._sparse_as_dense:
            raise InvalidArgumentError(
                f"DistributedOptimizer(sharded=True): the gradient of {entry.name!r} is sparse, but sharded=True supports "
                "only dense gradients. Give sparse_as_dense=True, or leave sharded out."
            )
        copy = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype)
        copy.copy_(grad.detach() if grad.layout is torch.strided else grad.detach().to_dense())
        entry.param.grad = entry.grad = copy
        return copy
