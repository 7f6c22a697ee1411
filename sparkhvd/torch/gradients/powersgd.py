"""Low-rank gradients with error feedback: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv:1905.13727).

A gradient of n x m is sent as P of n x rank and Q of m x rank, in two rounds: P = M Q is averaged and made
orthonormal, Q = M^T P is averaged, and every rank uses P Q^T. Q is kept, so that over the steps this is a power
iteration towards the average gradient's largest singular vectors. The difference between a rank's gradient and P Q^T
is the rank's *error*. It is added to the next gradient, so it is delayed and not lost.

Q and the number of steps are **the same on all ranks**, because they follow from averages. The error is **the rank's own**.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypedDict

import torch
from torch import Tensor

from sparkhvd.engine.calls import Call, Reduction
from sparkhvd.engine.engine import Engine
from sparkhvd.engine.library import DEVICE_CPU, Collective, ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integer
from sparkhvd.torch.collectives.cuda import divide_, submit
from sparkhvd.torch.collectives.tensors import Operation, engine_dtype, lend
from sparkhvd.torch.compressors import Compressor
from sparkhvd.torch.context import Context
from sparkhvd.torch.cuda import Device
from sparkhvd.torch.gradients.cuda import await_streams
from sparkhvd.torch.gradients.dense import (
    GradientSlot,
    Neighbours,
    ReduceOptions,
    owns_memory,
    release,
    require_cpu,
    require_same_place,
    require_same_shape,
)

# A gradient is compressed only if this makes it at least this many times smaller; else the arithmetic costs more time.
_WORTH = 4


class SavedMatrix(TypedDict):
    """Form of a `MatrixState` in a `state_dict`."""

    steps: int
    q: Tensor
    error: Tensor | None


@dataclass
class MatrixState:
    """State of a parameter with a compressed gradient.

    Attributes:
        steps: number of steps so far.
        q: m x rank; the same on every rank.
        error: n x m; the unsent part of its gradients. None until the first compressed step.
    """

    steps: int
    q: Tensor
    error: Tensor | None = None


class PowerSGD(Compressor):
    """Compression of one optimizer's gradients to two thin matrices.

    Created by `Compression.powersgd`.

    Args:
        rank: columns of P and Q.
        warm_up_steps: first steps whose gradients are sent uncompressed.
    """

    is_for_matrices = True  # not for sparse gradients

    def __init__(self, *, rank: int = 4, warm_up_steps: int = 0) -> None:
        columns, steps = to_integer(rank), to_integer(warm_up_steps)
        if columns is None or columns < 1 or steps is None or steps < 0:
            raise InvalidArgumentError(
                f"Compression.powersgd(rank={rank!r}, warm_up_steps={warm_up_steps!r}): rank must be 1 or more, and "
                "warm_up_steps 0 or more; both must be integers."
            )
        self.rank = columns
        self.warm_up_steps = steps
        self._states: dict[str, MatrixState] = {}
        self._parameters: dict[str, weakref.ref[Tensor]] = {}

    def __repr__(self) -> str:
        return f"Compression.powersgd(rank={self.rank}, warm_up_steps={self.warm_up_steps})"

    @staticmethod
    def compress(tensor: Tensor) -> NoReturn:
        """Raise an error, because a tensor without an optimizer has no state."""
        raise InvalidArgumentError(
            f"Compression.powersgd works only in a DistributedOptimizer, because it keeps the unsent part of gradients. It "
            f"cannot compress a tensor of shape {tuple(tensor.shape)} alone. Use Compression.fp16 or .bf16 here."
        )

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> NoReturn:
        """Refuse: a tensor alone has no state."""
        del ctx
        PowerSGD.compress(tensor)

    def state_dict(self) -> dict[str, SavedMatrix]:
        """The state for an exact resume. Save it on every rank, because each rank has its own errors.

        Returns:
            By parameter name: steps, q and error (None before the first compressed step). The tensors are not
            copies.
        """
        return {
            name: {"steps": state.steps, "q": state.q, "error": state.error}
            for name, state in self._states.items()
        }

    def load_state_dict(self, state: Mapping[str, SavedMatrix]) -> None:
        """Load a saved state, before the optimizer is built. Every rank must load the state of the same step.

        Raises:
            InvalidArgumentError: an optimizer uses this object already. The first backward pass checks that the steps
                and Q equal the other ranks'.
        """
        if self._parameters:
            raise InvalidArgumentError(
                f"{self!r}: load_state_dict() was called after the optimizer was built. Load the state first, then build "
                "the optimizer."
            )
        self._states = {
            name: MatrixState(
                int(saved["steps"]),
                saved["q"].clone(),
                None if (error := saved["error"]) is None else error.clone(),
            )
            for name, saved in state.items()
        }

    # --- For the reducer. ---

    def claim(self, entries: Sequence[GradientSlot]) -> None:
        """Register parameters for the compression of their gradients from now on.

        Raises:
            InvalidArgumentError: a name belongs to another parameter, or the loaded state has other shapes.
        """
        for entry in entries:
            owner = self._parameters.get(entry.name)
            if owner is not None and owner() is not entry.param:
                raise InvalidArgumentError(
                    f"{self!r} belongs to another optimizer, which also has a parameter {entry.name!r}. Create a separate "
                    "Compression.powersgd() for each optimizer."
                )
            self._parameters[entry.name] = weakref.ref(entry.param)
            if not self._is_worth(entry):
                continue
            state = self._states.setdefault(entry.name, MatrixState(0, self._first_q(entry)))
            state.q = _beside(entry, state.q)  # a loaded Q may be on another device
            state.error = None if state.error is None else _beside(entry, state.error)
            _, columns = matrix_shape(entry)
            wanted = (columns, self._columns(entry))
            if tuple(state.q.shape) != wanted:
                raise InvalidArgumentError(
                    f"{self!r}: the loaded state of {entry.name!r} has q of shape {tuple(state.q.shape)}; this "
                    f"parameter of shape {entry.shape} needs {wanted}. Load a state of the same model and the same rank=."
                )

    def fingerprint(self, entries: Sequence[GradientSlot]) -> list[str]:
        """Describe the part of each parameter's state that must be the same on all ranks."""
        states = [self._states.get(entry.name) for entry in entries]
        return [
            ""
            if state is None
            else f", after {state.steps} steps, q {float(state.q.cpu().sum())!r}"
            for state in states
        ]

    def is_due(self, entry: GradientSlot) -> bool:
        """Whether the gradient is compressed in this step."""
        state = self._states.get(entry.name)
        return state is not None and self._is_worth(entry) and state.steps >= self.warm_up_steps

    def count_step(self, entries: Sequence[GradientSlot]) -> bool:
        """Count a step of these parameters and return True if it ended a warm-up."""
        is_over = False
        for entry in entries:
            if entry.name in self._states:
                state = self._states[entry.name]
                state.steps += 1
                is_over |= state.steps == self.warm_up_steps
        return is_over

    def restart(self, entries: Sequence[GradientSlot]) -> None:
        """Reset Q, end the warm-up, and keep the errors."""
        for entry in entries:
            if entry.name in self._states:
                state = self._states[entry.name]
                state.steps = max(state.steps, self.warm_up_steps)
                state.q = self._first_q(entry)

    def state_of(self, entry: GradientSlot) -> MatrixState:
        """Get the state of a compressed parameter. The error of a new state is zero."""
        state = self._states[entry.name]
        if state.error is None:
            state.error = state.q.new_zeros(matrix_shape(entry))
        return state

    def _is_worth(self, entry: GradientSlot) -> bool:
        if len(entry.shape) < 2 or not entry.dtype.is_floating_point:
            return False
        return _WORTH * self.rank * sum(matrix_shape(entry)) <= entry.param.numel()

    def _columns(self, entry: GradientSlot) -> int:
        return min(self.rank, *matrix_shape(entry))

    def _first_q(self, entry: GradientSlot) -> Tensor:
        """A random Q, the same on every rank."""
        generator = torch.Generator().manual_seed(entry.index)
        _, columns = matrix_shape(entry)
        # Q need not be orthogonal, because only its span matters.
        shape = (columns, self._columns(entry))
        return _beside(
            entry, torch.randn(shape, generator=generator, dtype=_arithmetic(entry.dtype))
        )


def stateless(compression: type[Compressor] | Compressor) -> type[Compressor]:
    """Refuse a compression with state, because Adasum cannot use it."""
    if isinstance(compression, type):
        return compression
    raise InvalidArgumentError(
        f"DistributedOptimizer: {compression!r} compresses gradients, but op=Adasum combines the optimizer's steps. Use "
        "Average, or Compression.fp16 or .bf16."
    )


def describe(compression: type[Compressor] | Compressor) -> str:
    """Return the compression's name, the same on every rank."""
    if isinstance(compression, PowerSGD):
        return repr(compression)
    # Do not use the object's `repr`: it may contain an address, which differs between ranks.
    return (compression if isinstance(compression, type) else type(compression)).__name__


def _beside(entry: GradientSlot, values: Tensor) -> Tensor:
    """Move values to the device of the parameter."""
    if values.device == entry.param.device:
        return values
    return entry.param.new_empty(values.shape, dtype=values.dtype).copy_(values)


def matrix_shape(entry: GradientSlot) -> tuple[int, int]:
    """Compute the gradient's shape as a matrix: its first dimension, and the product of all others."""
    rows = entry.shape[0]
    return rows, entry.param.numel() // rows


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


# ----------------------------------------------------------------------------------------------------
# Bucket of low-rank gradients, reduced in two rounds.


class _Matrix:
    """A gradient while it is reduced.

    Attributes:
        p: the gradient's P, a part of the memory that the first round averages.
        next_q: the gradient's new Q, a part of the memory that the second round averages.
    """

    __slots__ = ("entry", "is_finite", "matrix", "next_q", "p", "state")

    def __init__(self, entry: GradientSlot, state: MatrixState, p: Tensor, next_q: Tensor) -> None:
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
            # Add in place: the user must not read the gradient until the cycle ends.
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
        if not self.is_finite:  # the same on every rank, because P is
            self.next_q.zero_()
            return
        # Householder's QR completes a rank-deficient P with orthonormal columns, so a gradient of zeros does not leave a
        # Q of zeros forever.
        self.p.copy_(torch.linalg.qr(self.p)[0])
        torch.mm(self.matrix.t(), self.p, out=self.next_q)

    def finish(self, factor: float, neighbours: Neighbours, *, resparsify: bool) -> None:
        """Set the gradient to P Q^T, and the error to the difference."""
        state, entry = self.state, self.entry
        assert state.error is not None
        if not self.p.is_cpu:
            self._finish_unseen(factor)
        elif not (self.is_finite and bool(self.next_q.isfinite().all())):
            # The optimizer or GradScaler must see the NaN, but the error must stay finite.
            self.matrix.fill_(torch.nan)
        else:
            torch.addmm(self.matrix, self.p, self.next_q.t(), alpha=-1, out=state.error)
            torch.mm(self.p, (self.next_q * factor).t(), out=self.matrix)
            length = self.next_q.norm()
            # Normalize Q, so that its product with the next gradient does not overflow.
            state.q = self.next_q / length if length > 0 else self.next_q.clone()
        grad = entry.grad
        assert grad is not None
        if self.matrix.data_ptr() != grad.data_ptr() or grad.layout is not torch.strided:
            release(entry, self.matrix.view(entry.shape), neighbours, resparsify=resparsify)
        self.matrix = torch.empty(0)

    # Variants for a GPU that never read values on the host, because the host would have to wait for them.

    def _project_back_unseen(self) -> None:
        is_finite = self.p.isfinite().all()
        self.p.copy_(torch.linalg.qr(self.p.masked_fill(~is_finite, 0.0))[0])
        torch.mm(self.matrix.t(), self.p, out=self.next_q)
        # After the second round every rank then sees that the gradient is not finite, and does not change its error.
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
    """Bucket of gradients reduced as P and Q, in two rounds: call `start_second_round` before `wait`.

    Args:
        name: name of the operation.
        entries: the parameters, all of one type.
        options: options of the reducer, with Average or Sum.
        compression: holds the states of the parameters.
        neighbours: returns all parameters whose gradients are reduced, by any optimizer.
        gpu: for parameters on a GPU: the context of the reducing engine, and the GPU.
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
        entries: list[GradientSlot],
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
        # On a GPU NCCL sums, and torch divides later.
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
        """Submit P, and a flag for each of this rank's gradients."""
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
        """Wait for P, then submit Q. Every rank must call this, also if P is not finite."""
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
            else:  # no rank has a gradient, so the error stays for a later step
                matrix.entry.param.grad = None

    def _used(self) -> list[bool]:
        """Check for each parameter whether any rank has a gradient."""
        if not any([entry.missing for entry in self.entries]):
            return [True] * len(self.entries)
        return [flag > 0 for flag in self._flags.tolist()]

    def take(self, entry: GradientSlot) -> None:
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
    """Create flat memory for matrices of these shapes and return it, and a view of it for each matrix."""
    counts = [rows * columns for rows, columns in shapes]
    flat = like.new_zeros(sum(counts))
    parts = [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
    return flat, parts
