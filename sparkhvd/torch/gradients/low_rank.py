"""Bucket of low-rank gradients, reduced in two rounds (see `powersgd`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine.engine import Call, Collective, Engine, ReduceOp, Reduction
from sparkhvd.engine.library import DEVICE_CPU
from sparkhvd.torch.collectives.cuda_reductions import divide_, submit
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.collectives.tensors import engine_dtype, lend
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device
from sparkhvd.torch.gradients.cuda import await_streams
from sparkhvd.torch.gradients.entry import (
    Entry,
    Neighbours,
    ReduceOptions,
    give_back,
    owns_memory,
    require_cpu,
    require_same_place,
    require_same_shape,
)
from sparkhvd.torch.gradients.powersgd import MatrixState, PowerSGD, matrix_shape

__all__ = ["LowRankBucket"]


class _Matrix:
    """Gradient during its reduction.

    Attributes:
        p: its part of the memory that the first round averages.
        next_q: its part of the memory that the second round averages.
    """

    __slots__ = ("entry", "is_finite", "matrix", "next_q", "p", "state")

    def __init__(self, entry: Entry, state: MatrixState, p: Tensor, next_q: Tensor) -> None:
        self.entry = entry
        self.state = state
        self.p = p
        self.next_q = next_q
        self.matrix = torch.empty(0)
        self.is_finite = True

    def project(self) -> None:
        """Compute P = (gradient + error) Q, for the first round."""
        entry, error = self.entry, self.state.error
        assert entry.grad is not None
        assert error is not None
        grad = entry.grad
        if error.is_cpu:
            require_cpu(entry, grad)
        else:
            require_same_place(entry, grad)
        require_same_shape(entry, grad)
        entry.place = grad.data_ptr() if grad.layout is torch.strided else -1
        if (
            grad.layout is torch.strided
            and grad.dtype is error.dtype
            and grad.is_contiguous()
            and owns_memory(entry.grad)
        ):
            # In the gradient's own memory, whose contents are undefined until the cycle ends.
            self.matrix = grad.detach().view(error.shape).add_(error)
        else:
            grad = grad.detach()
            dense = grad if grad.layout is torch.strided else grad.to_dense()
            self.matrix = dense.reshape(error.shape).to(error.dtype) + error
        torch.mm(self.matrix, self.state.q, out=self.p)

    def project_back(self) -> None:
        """Compute Q = (gradient + error)^T P with P orthonormal, for the second round."""
        if not self.p.is_cpu:
            self._project_back_unseen()
            return
        self.is_finite = bool(self.p.isfinite().all())
        if not self.is_finite:  # on every rank, because P is the same on all of them
            self.next_q.zero_()
            return
        # Householder's QR: where P has fewer dimensions than columns the rest is orthonormal too, so a gradient of
        # zeros does not leave a Q of zeros for ever.
        self.p.copy_(torch.linalg.qr(self.p)[0])
        torch.mm(self.matrix.t(), self.p, out=self.next_q)

    def finish(self, factor: float, neighbours: Neighbours, *, resparsify: bool) -> None:
        """Set the gradient to P Q^T, and the error to the difference."""
        state, entry = self.state, self.entry
        assert state.error is not None
        if not self.p.is_cpu:
            self._finish_unseen(factor)
        elif not (self.is_finite and bool(self.next_q.isfinite().all())):
            # The optimizer, or GradScaler, must see it; the memory must not.
            self.matrix.fill_(torch.nan)
        else:
            torch.addmm(self.matrix, self.p, self.next_q.t(), alpha=-1, out=state.error)
            torch.mm(self.p, (self.next_q * factor).t(), out=self.matrix)
            length = self.next_q.norm()
            # Of length 1: the product with the next gradient keeps its range.
            state.q = self.next_q / length if length > 0 else self.next_q.clone()
        grad = entry.grad
        assert grad is not None
        if self.matrix.data_ptr() != grad.data_ptr() or grad.layout is not torch.strided:
            give_back(entry, self.matrix.view(entry.shape), neighbours, resparsify=resparsify)
        self.matrix = torch.empty(0)

    # On a GPU the host does not look at values, because it would have to wait for them.

    def _project_back_unseen(self) -> None:
        is_finite = self.p.isfinite().all()
        self.p.copy_(torch.linalg.qr(self.p.masked_fill(~is_finite, 0.0))[0])
        torch.mm(self.matrix.t(), self.p, out=self.next_q)
        # So that every rank sees in the second round that the gradient is not finite, and keeps its error.
        self.next_q.masked_fill_(~is_finite, torch.nan)

    def _finish_unseen(self, factor: float) -> None:
        state = self.state
        assert state.error is not None
        is_finite = self.next_q.isfinite().all()
        error = torch.addmm(self.matrix, self.p, self.next_q.t(), alpha=-1)
        state.error.copy_(error.where(is_finite, state.error))
        torch.mm(self.p, (self.next_q * factor).t(), out=self.matrix)
        self.matrix.masked_fill_(~is_finite, torch.nan)
        length = self.next_q.norm()
        q = self.next_q / length.masked_fill(length == 0, 1.0)
        state.q = q.where(is_finite, state.q)


class LowRankBucket:
    """Bucket of gradients that are reduced as P and Q, in two rounds: `start_second_round` comes before `wait`.

    Args:
        name: of the operation.
        entries: the parameters, all of one type.
        options: of the reducer: Average or Sum.
        compression: has their states.
        neighbours: returns all parameters whose gradients are reduced, by any optimizer.
        gpu: for parameters on a GPU: the context whose engine reduces, and the GPU.
    """

    __slots__ = (
        "_first",
        "_flags",
        "_flat_p",
        "_flat_q",
        "_gpu",
        "_matrices",
        "_neighbours",
        "_options",
        "_second",
        "_second_work",
        "entries",
        "name",
        "pending",
        "work",
    )

    def __init__(
        self,
        name: str,
        entries: list[Entry],
        options: ReduceOptions,
        compression: PowerSGD,
        neighbours: Callable[[], Iterable[Tensor]],
        gpu: tuple[Context, Device] | None = None,
    ) -> None:
        self._gpu = gpu
        self.name = name
        self.entries = entries
        self.pending = len(entries)
        self.work: Operation | None = None
        self._options = options
        self._neighbours = neighbours
        self._second_work: Operation | None = None
        states = [compression.state_of(entry) for entry in entries]
        ranks = [state.q.shape[1] for state in states]
        shapes = [matrix_shape(entry) for entry in entries]
        q = states[0].q
        p_shapes = [(rows, rank) for (rows, _), rank in zip(shapes, ranks, strict=True)]
        q_shapes = [(columns, rank) for (_, columns), rank in zip(shapes, ranks, strict=True)]
        self._flat_p, ps = _flat(p_shapes, q)
        self._flat_q, qs = _flat(q_shapes, q)
        self._flags = q.new_empty(len(entries))
        self._matrices = [_Matrix(*each) for each in zip(entries, states, ps, qs, strict=True)]
        self._first = self._call([self._flat_p, self._flags])
        self._second = self._call([self._flat_q])
        for entry in entries:
            entry.bucket = self

    def _call(self, tensors: Sequence[Tensor]) -> Call:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        dtype = engine_dtype(self.name, tensors[0])
        process_set = self._options.process_set
        # On a GPU torch divides, afterwards.
        op, device = ReduceOp.AVERAGE, DEVICE_CPU
        if self._gpu is not None:
            op, device = ReduceOp.SUM, self._gpu[1].ordinal
        reduction = Reduction(op)
        call = Call(Collective.ALLREDUCE, shapes, dtype, reduction, process_set, device=device)
        for index, tensor in enumerate(tensors):
            call.place(index, tensor.data_ptr(), tensor.data_ptr())
        return call

    def _submit(self, engine: Engine, call: Call, name: str, tensors: list[Tensor]) -> Operation:
        if self._gpu is None:
            return engine.start(call, name, tensors)
        context, device = self._gpu
        finish = functools.partial(divide_, tensors, len(self._options.ranks))
        stream = device.stream()
        return submit(context, device, call, name, stream, lend(*tensors), finish=finish)

    @torch.no_grad()
    def start(self, engine: Engine) -> None:
        """Submit P, and a flag for each gradient that this rank has."""
        if self._gpu is not None:
            await_streams(self._gpu[1], self.entries)
        for matrix in self._matrices:
            matrix.project()
        self._flags.fill_(1)
        for number, entry in enumerate(self.entries):
            if entry.missing:
                self._flags[number].zero_()
        self.work = self._submit(engine, self._first, self.name, [self._flat_p, self._flags])

    @torch.no_grad()
    def start_second_round(self, engine: Engine) -> None:
        """Wait for P and submit Q; on every rank, also where P is not finite."""
        assert self.work is not None
        self.work.wait()
        for matrix in self._matrices:
            matrix.project_back()
        self._second_work = self._submit(engine, self._second, f"{self.name}.q", [self._flat_q])

    @torch.no_grad()
    def wait(self) -> None:
        """Wait until the reduced gradients lie in `.grad`."""
        assert self._second_work is not None
        self._second_work.wait()
        options = self._options
        factor = len(options.ranks) if options.op is ReduceOp.SUM else 1
        neighbours = Neighbours(self._neighbours)
        for matrix, used in zip(self._matrices, self._used(), strict=True):
            if used:
                matrix.finish(factor, neighbours, resparsify=options.sparse_as_dense)
            else:  # the error waits for a step in which some rank has a gradient
                matrix.entry.param.grad = None

    def _used(self) -> list[bool]:
        """Return for each parameter True if any rank has a gradient."""
        if not any([entry.missing for entry in self.entries]):
            return [True] * len(self.entries)
        return [flag > 0 for flag in self._flags.tolist()]

    def take(self, entry: Entry) -> None:
        """Take the gradient as it is, or zeros."""
        grad = entry.param.grad
        entry.grad = entry.make_zeros() if grad is None else grad

    def reset(self) -> None:
        """Get ready for the next cycle."""
        self.work = self._second_work = None
        self.pending = len(self.entries)
        for matrix in self._matrices:
            matrix.matrix = torch.empty(0)
        for entry in self.entries:
            entry.grad = None
            entry.missing = False
            entry.stream = None


def _flat(shapes: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Make flat memory, and a matrix of each shape in it."""
    counts = [rows * columns for rows, columns in shapes]
    flat = like.new_zeros(sum(counts))
    parts = [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
    return flat, parts
