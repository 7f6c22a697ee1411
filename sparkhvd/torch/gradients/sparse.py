"""Sparse gradients (`nn.Embedding(sparse=True)`), reduced as sparse: every rank gets the rows of all ranks.

**Layouts**: a rank learns that a gradient is sparse only when the gradient arrives, and a rank that did not use the
layer has no gradient. So the ranks vote: `LayoutVote` counts the dense and the sparse gradients over all ranks. The
first vote is taken when the first backward pass ends, before the first submission. A parameter without a gradient on
any rank has no bucket, and takes part in every later vote until a rank has its gradient. From then on its layout is
fixed.

**One allgather** per parameter is submitted when its gradient arrives: a header with the layout of this rank's
gradient, the indices, the values, all as bytes. A rank with another layout than the fixed one sends only the header,
so that every rank raises the same error.

**The result** has the entries of all ranks in the order of ranks, with duplicates. Like autograd's own, it is not
coalesced, because most optimizers need no sum of a row's entries, and sorting them takes longer than sending
them. Every rank has the same entries in the same order, so the optimizer's result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine.calls import Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import Collective, DType, ReduceOp
from sparkhvd.errors import MismatchError
from sparkhvd.torch.collectives.allgathers import gathered, joined_by, start_allgather
from sparkhvd.torch.collectives.cuda import divide_, start_device_allgather
from sparkhvd.torch.collectives.tensors import Operation, view
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import RankGpu
from sparkhvd.torch.gradients.cuda import await_streams
from sparkhvd.torch.gradients.dense import (
    GradientSlot,
    ReduceOptions,
    require_same_place,
    require_same_shape,
)

# Values in the header of a message: the layout of the sender's gradient.
_NO_GRADIENT, _AS_PLANNED, _DENSE, _OTHER_DIMS = range(4)
_HEAD_BYTES = 8
_NUMBERS_PER_PARAMETER = 3


@dataclass(frozen=True)
class Votes:
    """Sum of the votes of all ranks.

    Attributes:
        is_complete: whether every rank voted; ranks that wait in `hvd.join()` do not vote.
        layouts: for each parameter None (no rank has a gradient), 0 (dense) or the number of sparse dimensions.
    """

    is_complete: bool
    layouts: list[int | None]


class LayoutVote:
    """Counts the layouts of all ranks' gradients. Every rank of the process set must create an object.

    Args:
        context: context of the engine.
        label: name of the optimizer.
        options: options of the optimizer.
        entries: the parameters, the same on every rank; their `.grad` is read now.
    """

    def __init__(
        self, context: Context, label: str, options: ReduceOptions, entries: Sequence[GradientSlot]
    ) -> None:
        self._context = context
        self._label = label
        self._options = options
        self._entries = list(entries)
        self._layouts = [_sparse_dim(entry.param.grad) for entry in self._entries]
        # The number of votes, 1. Then for each parameter: whether the gradient is dense, whether it is sparse, its
        # number of sparse dimensions. The ranks add these numbers up, because ranks that wait in `hvd.join()` then add
        # nothing.
        numbers = [1]
        for layout in self._layouts:
            numbers += [layout == 0, layout not in (None, 0), layout or 0]
        self._sums = torch.tensor(numbers, dtype=torch.int64)
        call = context.engine.prepare(
            Collective.ALLREDUCE,
            [view(self._sums, self._sums)],
            DType.INT64,
            Reduction(ReduceOp.SUM),
            options.process_set,
        )
        self._work = context.engine.start(call, f"{label}.layouts", self._sums)

    def wait(self) -> Votes:
        """Wait for the votes of all ranks. Repeated calls are allowed.

        Raises:
            MismatchError: some ranks have a sparse gradient of a parameter and others a dense one, or the options do not
                support a sparse gradient. Raised on every rank.
        """
        self._work.wait()
        present, *sums = self._sums.tolist()
        layouts: list[int | None] = []
        mixed: list[int] = []
        for number in range(len(self._entries)):
            first = number * _NUMBERS_PER_PARAMETER
            dense, sparse, dims = sums[first : first + _NUMBERS_PER_PARAMETER]
            layouts.append(dims // sparse if sparse else 0 if dense else None)
            if sparse and (dense or dims % sparse):
                mixed.append(number)
        is_complete = present == len(self._options.ranks)
        if mixed:
            raise MismatchError(self._mixture(mixed[0], is_complete))
        sparse_ones = [e for e, layout in zip(self._entries, layouts, strict=True) if layout]
        if sparse_ones:
            self._check_possible(sparse_ones[0], is_complete)
        return Votes(is_complete, layouts)

    def _check_possible(self, entry: GradientSlot, is_complete: bool) -> None:
        options = self._options
        what = f"{self._label}: the gradient of {entry.name!r} is sparse, and "
        if options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise MismatchError(
                f"{what}op={options.op.name.title()} is not possible, because entries of the same index add up. Use Average "
                "or Sum, or give sparse_as_dense=True."
            )
        if getattr(options.compression, "is_for_matrices", False):
            raise MismatchError(
                f"{what}{options.compression!r} is for dense gradients. Give sparse_as_dense=True, use another "
                "compression, or build the layer with sparse=False."
            )
        if not is_complete:
            raise MismatchError(
                f"{what}a rank has called join(), but sparse gradients need every rank. Give sparse_as_dense=True, or give "
                "every rank the same number of batches."
            )

    def _mixture(self, number: int, is_complete: bool) -> str:
        """Describe the layout of each rank."""
        layout = self._layouts[number]
        entry = self._entries[number]
        if not is_complete:  # ranks that wait in `hvd.join()` do not answer
            return f"{self._label}: the gradient of {entry.name!r} is {_in_words(layout)} on this rank, but not on every rank."
        code = torch.tensor([-1 if layout is None else layout], dtype=torch.int64)
        name, process_set = f"{self._label}.mixture", self._options.process_set
        work = start_allgather(self._context, name, code, process_set)
        work.wait()
        codes = gathered(work, code.dtype, code.shape)[0].tolist()
        kinds = [_in_words(None if code < 0 else code) for code in codes]
        return _mixture(self._label, entry.name, self._options.ranks, kinds)


def _sparse_dim(grad: Tensor | None) -> int | None:
    """Count the sparse dimensions: 0 for a dense gradient, or None without a gradient."""
    if grad is None:
        return None
    return 0 if grad.layout is torch.strided else grad.sparse_dim()


def _row_length(entry: GradientSlot) -> int:
    """Count the values per index."""
    return torch.Size(entry.shape[entry.sparse_dim :]).numel()


def _rows(tensor: Tensor, length: int) -> Tensor:
    """Reshape to row-major rows, for any strides in dimensions of length 1."""
    return tensor.reshape(-1).view(len(tensor), length)


def _in_words(sparse_dim: int | None) -> str:
    if sparse_dim is None:
        return "none"
    return (
        "dense" if sparse_dim == 0 else f"sparse in {sparse_dim} dimension{'s'[: sparse_dim > 1]}"
    )


def _mixture(label: str, name: str, ranks: Sequence[int], kinds: Sequence[str]) -> str:
    pairs = ", ".join(f"rank {rank} {kind}" for rank, kind in zip(ranks, kinds, strict=True))
    return (
        f"{label}: ranks disagree on the layout of the gradient of {name!r}: {pairs}. "
        "Build the layer with the same sparse= on every rank, or give sparse_as_dense=True."
    )


class SparseBucket:
    """Bucket with the sparse gradient of one parameter. Its `sparse_dim` is fixed and the same on every rank.

    Args:
        name: name of the operation.
        entry: the parameter.
        options: options of the reducer, with Average or Sum, and a compression of the values.
        gpu: the optimizer's context for a parameter on a GPU. Then `wait` waits for the GPU, to read the headers.
    """

    __slots__ = ("_context", "_gpu", "_options", "entries", "name", "pending", "sent", "work")

    def __init__(
        self, name: str, entry: GradientSlot, options: ReduceOptions, gpu: Context | None = None
    ) -> None:
        self._gpu = gpu
        self.name = name
        self.entries = [entry]
        self.pending = 1
        self.work: Operation | None = None
        self.sent: list[Any] = []
        self._options = options
        self._context: Any = None  # the compressor's context for `decompress`
        entry.bucket = self

    def start(self, engine: Engine) -> None:
        """Submit this rank's entries, or only a header without a gradient."""
        if self._gpu is not None:
            device = self._gpu.part(RankGpu).device
            assert device is not None  # the planner has opened it
            await_streams(device, self.entries)
        parts = [part.view(torch.uint8) for part in self._message(self.entries[0])]
        if self._gpu is not None:
            self.work = start_device_allgather(
                self._gpu, self.name, parts, self._options.process_set
            )
            return
        views = [view(part, None) for part in parts]
        call = engine.prepare(
            Collective.ALLGATHER, views, DType.UINT8, process_set=self._options.process_set
        )
        self.work = engine.start(call, self.name, parts)

    def take(self, entry: GradientSlot) -> None:
        """Use the gradient unchanged. It may be None."""
        entry.grad = entry.param.grad

    def reset(self) -> None:
        """Get ready for the next cycle."""
        self.work = None
        self.pending = 1
        self.entries[0].grad = self.entries[0].stream = None

    def wait(self) -> None:
        """Wait until the entries of all ranks are in `.grad`.

        It is None if no rank has a gradient.

        Raises:
            MismatchError: a rank had a dense gradient, or another number of sparse dimensions.
        """
        assert self.work is not None
        self.work.wait()
        entry = self.entries[0]
        heads, indices, values = [
            part for part, _ in joined_by(self.work, torch.uint8, self._shapes(entry))
        ]
        codes = heads.view(torch.int64).flatten().tolist()
        if any(code in (_DENSE, _OTHER_DIMS) for code in codes):
            words = ["none", _in_words(entry.sparse_dim), "dense", "sparse in other dimensions"]
            kinds = [words[code] for code in codes]
            raise MismatchError(_mixture(self.name, entry.name, self._options.ranks, kinds))
        if _AS_PLANNED not in codes:
            entry.param.grad = None
            return
        entry.param.grad = self._joined(entry, indices.view(torch.int64), values)

    def _message(self, entry: GradientSlot) -> tuple[Tensor, Tensor, Tensor]:
        """Create the message: the header, rows of indices, and rows of values in the wire dtype."""
        grad = entry.grad
        code = _NO_GRADIENT
        if grad is not None:
            require_same_place(entry, grad)
            require_same_shape(entry, grad)
            layout = _sparse_dim(grad)
            code = _AS_PLANNED if layout == entry.sparse_dim else _OTHER_DIMS if layout else _DENSE
        if grad is None or code != _AS_PLANNED:
            param = entry.param.detach()
            indices = param.new_empty((0, entry.sparse_dim), dtype=torch.int64)
            values = param.new_empty((0, *entry.shape[entry.sparse_dim :]))
        else:
            indices, values = (
                _rows(grad._indices().t(), entry.sparse_dim),
                grad._values().detach().resolve_neg(),
            )
        values, self._context = self._options.compression.compress(values)
        wire = _rows(values.to(entry.wire_dtype), _row_length(entry))
        return indices.new_full((1, 1), code), indices, wire

    def _shapes(self, entry: GradientSlot) -> list[tuple[int, int]]:
        row_bytes = _row_length(entry) * entry.wire_dtype.itemsize
        return [(1, _HEAD_BYTES), (1, _HEAD_BYTES * entry.sparse_dim), (1, row_bytes)]

    def _joined(self, entry: GradientSlot, indices: Tensor, wire: Tensor) -> Tensor:
        """Build the sparse gradient from all ranks' entries. Average divides the values."""
        options = self._options
        values = options.compression.decompress(wire.view(entry.wire_dtype), self._context)
        if options.op is ReduceOp.AVERAGE:
            divide_([values], len(options.ranks))
        return torch.sparse_coo_tensor(
            indices.t(),
            values.view(len(values), *entry.shape[entry.sparse_dim :]),
            entry.shape,
            check_invariants=False,
            is_coalesced=False,
        )
