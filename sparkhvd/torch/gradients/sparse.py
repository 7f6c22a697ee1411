"""Sparse gradients (`nn.Embedding(sparse=True)`), reduced as sparse: every rank gets the rows of all ranks.

**Which gradients are sparse** cannot be seen before the first one arrives, and a rank that did not use the layer has
none. So the ranks agree: `LayoutVote` adds up, over all ranks, who has a dense and who has a sparse gradient. The
first vote is taken when the first backward pass ends, before anything is submitted; a parameter that no rank gave a
gradient is in no bucket, and in every later vote until it has one. From then on its layout is settled.

**What is sent** is one allgather per parameter, submitted when its gradient arrives: a head that says what this
rank has, the indices, the values, all as bytes. A rank whose gradient is not of the settled layout sends the head
alone, so that every rank learns of it and raises the same error.

**The result** has the entries of all ranks in the order of ranks, each as often as ranks have it: as autograd's own, it
is not coalesced, because most optimizers need no sum of a row's entries, and sorting them takes longer than sending
them. Every rank has the same entries in the same order, so what an optimizer makes of them has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkhvd.engine.engine import Collective, DType, Engine, ReduceOp, Reduction
from sparkhvd.errors import MismatchError
from sparkhvd.torch.collectives.allgathers import gathered, joined_by, start_allgather
from sparkhvd.torch.collectives.cuda_gathers import start_device_allgather
from sparkhvd.torch.collectives.cuda_reductions import divide_
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.collectives.tensors import view
from sparkhvd.torch.context import Context
from sparkhvd.torch.gradients.cuda import await_streams
from sparkhvd.torch.gradients.entry import (
    Entry,
    ReduceOptions,
    require_same_place,
    require_same_shape,
)

__all__ = ["LayoutVote", "SparseBucket", "Votes"]

# What the head of a message says.
_NO_GRADIENT, _AS_PLANNED, _DENSE, _OTHER_DIMS = range(4)
_HEAD_BYTES = 8
_NUMBERS_PER_PARAMETER = 3


@dataclass(frozen=True)
class Votes:
    """What all ranks said.

    Attributes:
        is_complete: whether every rank voted; one that has joined does not.
        layouts: per parameter None (no rank has a gradient), 0 (dense) or the number of sparse dimensions.
    """

    is_complete: bool
    layouts: list[int | None]


class LayoutVote:
    """Adds up what kinds of gradients the ranks have. Every rank of the process set makes one.

    Args:
        context: whose engine adds.
        label: of the optimizer.
        options: of the optimizer.
        entries: the parameters in question, the same on every rank; their `.grad` is looked at now.
    """

    def __init__(
        self, context: Context, label: str, options: ReduceOptions, entries: Sequence[Entry]
    ) -> None:
        self._context = context
        self._label = label
        self._options = options
        self._entries = list(entries)
        self._mine = [_sparse_dim(entry.param.grad) for entry in self._entries]
        # That this rank is there; for each parameter whether it is dense, whether it is sparse, in how many
        # dimensions. A sum, because ranks that have joined add nothing to it.
        numbers = [1]
        for found in self._mine:
            numbers += [found == 0, found not in (None, 0), found or 0]
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
        """What the ranks have together; may be called again.

        Raises:
            MismatchError: of one parameter some ranks have a sparse gradient and others a dense one; or a sparse
                one cannot be reduced as the options ask. Raised on every rank.
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
        sparse_ones = [e for e, found in zip(self._entries, layouts, strict=True) if found]
        if sparse_ones:
            self._check_possible(sparse_ones[0], is_complete)
        return Votes(is_complete, layouts)

    def _check_possible(self, entry: Entry, is_complete: bool) -> None:
        options = self._options
        what = f"{self._label}: the gradient of {entry.name!r} is sparse, and "
        if options.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise MismatchError(
                f"{what}op={options.op.name.title()} is not possible: entries are joined and add up. Use Average "
                "or Sum, or give sparse_as_dense=True."
            )
        if getattr(options.compression, "is_for_matrices", False):
            raise MismatchError(
                f"{what}{options.compression!r} is for dense ones. Give sparse_as_dense=True, use another "
                "compression, or build the layer with sparse=False."
            )
        if not is_complete:
            raise MismatchError(
                f"{what}a rank has joined: sparse gradients need every rank. Give sparse_as_dense=True, or the "
                "same number of batches to every rank."
            )

    def _mixture(self, number: int, is_complete: bool) -> str:
        """Says which rank has what."""
        mine = self._mine[number]
        entry = self._entries[number]
        if not is_complete:  # who has joined cannot be asked
            return f"{self._label}: the gradient of {entry.name!r} is {_in_words(mine)} here, and not on every rank."
        code = torch.tensor([-1 if mine is None else mine], dtype=torch.int64)
        name, process_set = f"{self._label}.mixture", self._options.process_set
        work = start_allgather(self._context, name, code, process_set)
        work.wait()
        codes = gathered(work, code.dtype, code.shape)[0].tolist()
        kinds = [_in_words(None if found < 0 else found) for found in codes]
        return _mixture(self._label, entry.name, self._options.ranks, kinds)


def _sparse_dim(grad: Tensor | None) -> int | None:
    """None, 0 for a dense gradient, else its number of sparse dimensions."""
    if grad is None:
        return None
    return 0 if grad.layout is torch.strided else grad.sparse_dim()


def _row_length(entry: Entry) -> int:
    """Values per index."""
    return torch.Size(entry.shape[entry.sparse_dim :]).numel()


def _rows(tensor: Tensor, length: int) -> Tensor:
    """Row-major, whatever its strides in dimensions of length 1 say."""
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
    """The sparse gradient of one parameter. Its `sparse_dim` is settled and the same on every rank.

    Args:
        name: of the operation.
        entry: the parameter.
        options: how to reduce: Average or Sum, compression of the values.
        gpu: of a parameter on a GPU, the optimizer's context. There `wait` waits for the GPU, to learn what came.
    """

    __slots__ = ("_context", "_gpu", "_options", "entries", "name", "pending", "sent", "work")

    def __init__(
        self, name: str, entry: Entry, options: ReduceOptions, gpu: Context | None = None
    ) -> None:
        self._gpu = gpu
        self.name = name
        self.entries = [entry]
        self.pending = 1
        self.work: Operation | None = None
        self.sent: list[Any] = []
        self._options = options
        self._context: Any = None  # the compression's
        entry.bucket = self

    def start(self, engine: Engine) -> None:
        """Submit what this rank has, which may be nothing."""
        if self._gpu is not None:
            assert self._gpu.device is not None  # opened for the parameters
            await_streams(self._gpu.device, self.entries)
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

    def take(self, entry: Entry) -> None:
        """The gradient as it is, or none."""
        entry.grad = entry.param.grad

    def reset(self) -> None:
        """Ready for the next cycle."""
        self.work = None
        self.pending = 1
        self.entries[0].grad = self.entries[0].stream = None

    def wait(self) -> None:
        """Wait until the entries of all ranks lie in `.grad`; None if no rank had any.

        Raises:
            MismatchError: a rank had a dense gradient, or another number of sparse dimensions.
        """
        assert self.work is not None
        self.work.wait()
        entry = self.entries[0]
        heads, indices, values = [
            part for part, _ in joined_by(self.work, torch.uint8, self._shapes(entry))
        ]
        said = heads.view(torch.int64).flatten().tolist()
        if any(each in (_DENSE, _OTHER_DIMS) for each in said):
            words = ["none", _in_words(entry.sparse_dim), "dense", "sparse in other dimensions"]
            kinds = [words[each] for each in said]
            raise MismatchError(_mixture(self.name, entry.name, self._options.ranks, kinds))
        if _AS_PLANNED not in said:
            entry.param.grad = None
            return
        entry.param.grad = self._joined(entry, indices.view(torch.int64), values)

    def _message(self, entry: Entry) -> tuple[Tensor, Tensor, Tensor]:
        """A head, rows of indices, rows of values as they are sent."""
        grad = entry.grad
        said = _NO_GRADIENT
        if grad is not None:
            require_same_place(entry, grad)
            require_same_shape(entry, grad)
            found = _sparse_dim(grad)
            said = _AS_PLANNED if found == entry.sparse_dim else _OTHER_DIMS if found else _DENSE
        if grad is None or said != _AS_PLANNED:
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
        return indices.new_full((1, 1), said), indices, wire

    def _shapes(self, entry: Entry) -> list[tuple[int, int]]:
        row_bytes = _row_length(entry) * entry.wire_dtype.itemsize
        return [(1, _HEAD_BYTES), (1, _HEAD_BYTES * entry.sparse_dim), (1, row_bytes)]

    def _joined(self, entry: Entry, indices: Tensor, wire: Tensor) -> Tensor:
        """The entries of all ranks, each divided for an average, in the memory in which they came."""
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
