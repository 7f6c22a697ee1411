"""Low-rank gradients with error feedback: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv:1905.13727).

A gradient of n x m is sent as P of n x rank and Q of m x rank, in two rounds: P = M Q is averaged and made
orthonormal, Q = M^T P is averaged, and every rank uses P Q^T. Q is kept, so that over the steps this is a power
iteration towards the average gradient's largest singular vectors. The difference between a rank's gradient and P Q^T
is the rank's *error*; it is added to the next gradient, so nothing is lost, only delayed.

**All ranks have alike** Q and the number of steps, because they follow from averages. The error is **the rank's own**.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypedDict

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_integer
from sparkhvd.torch.compressors import Compressor
from sparkhvd.torch.gradients.entry import Entry

__all__ = ["MatrixState", "PowerSGD", "SavedMatrix", "describe", "matrix_shape", "stateless"]

# Gradients are compressed if they get at least this many times smaller: less does not pay for the arithmetic.
_WORTH = 4


class SavedMatrix(TypedDict):
    """`MatrixState` in a `state_dict`."""

    steps: int
    q: Tensor
    error: Tensor | None


@dataclass
class MatrixState:
    """State of a parameter whose gradient is compressed.

    Attributes:
        steps: steps that it has made.
        q: m x rank; the same on every rank.
        error: n x m; the part of its gradients that was not sent yet. None until the first compressed step.
    """

    steps: int
    q: Tensor
    error: Tensor | None = None


class PowerSGD(Compressor):
    """Compression that sends gradients as two thin matrices. For one optimizer; made by `Compression.powersgd`.

    Args:
        rank: columns of P and Q.
        warm_up_steps: steps at the beginning whose gradients are sent as they are.
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
        """Refuse: a tensor alone has no state."""
        raise InvalidArgumentError(
            f"Compression.powersgd keeps the unsent part of an optimizer's gradients; it cannot compress "
            f"a tensor of shape {tuple(tensor.shape)} alone. Use Compression.fp16 or .bf16 here."
        )

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> NoReturn:
        """Refuse: a tensor alone has no state."""
        del ctx
        PowerSGD.compress(tensor)

    def state_dict(self) -> dict[str, SavedMatrix]:
        """Return the state from which training goes on exactly. The errors are this rank's own: save it on every rank.

        Returns:
            By parameter name: steps, q and error (None before the first compressed step). The tensors are not
            copies.
        """
        return {
            name: {"steps": state.steps, "q": state.q, "error": state.error}
            for name, state in self._states.items()
        }

    def load_state_dict(self, state: Mapping[str, SavedMatrix]) -> None:
        """Go on from a saved state, before the optimizer is built. Every rank must, from the same step.

        Raises:
            InvalidArgumentError: an optimizer uses this already. Its warm-up and its Q must be as the other
                ranks', which is looked at when it is built.
        """
        if self._parameters:
            raise InvalidArgumentError(
                f"{self!r}: load_state_dict() after the optimizer was built. Load first, then build it."
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

    def claim(self, entries: Sequence[Entry]) -> None:
        """Take over these parameters, whose gradients are compressed from now on.

        Raises:
            InvalidArgumentError: a name is another parameter's already, or the loaded state is for other shapes.
        """
        for entry in entries:
            owner = self._parameters.get(entry.name)
            if owner is not None and owner() is not entry.param:
                raise InvalidArgumentError(
                    f"{self!r} is another optimizer's, which has a parameter {entry.name!r} too. Make one for each."
                )
            self._parameters[entry.name] = weakref.ref(entry.param)
            if not self._is_worth(entry):
                continue
            state = self._states.setdefault(entry.name, MatrixState(0, self._first_q(entry)))
            state.q = _beside(entry, state.q)  # a loaded one may come from a file
            state.error = None if state.error is None else _beside(entry, state.error)
            _, columns = matrix_shape(entry)
            wanted = (columns, self._columns(entry))
            if tuple(state.q.shape) != wanted:
                raise InvalidArgumentError(
                    f"{self!r}: the loaded state of {entry.name!r} has q of shape {tuple(state.q.shape)}; this "
                    f"parameter of shape {entry.shape} needs {wanted}. Load the state of this model and rank=."
                )

    def fingerprint(self, entries: Sequence[Entry]) -> list[str]:
        """Describe the state of every parameter that must be the same on all ranks."""
        states = [self._states.get(entry.name) for entry in entries]
        return [
            ""
            if state is None
            else f", after {state.steps} steps, q {float(state.q.cpu().sum())!r}"
            for state in states
        ]

    def is_due(self, entry: Entry) -> bool:
        """Return True if the gradient is compressed in this step."""
        state = self._states.get(entry.name)
        return state is not None and self._is_worth(entry) and state.steps >= self.warm_up_steps

    def count_step(self, entries: Sequence[Entry]) -> bool:
        """Count a step of these parameters; return True if the warm-up of one of them is over now."""
        is_over = False
        for entry in entries:
            if entry.name in self._states:
                state = self._states[entry.name]
                state.steps += 1
                is_over |= state.steps == self.warm_up_steps
        return is_over

    def restart(self, entries: Sequence[Entry]) -> None:
        """Reset the state that all ranks have alike, Q and the number of steps; the warm-up is over."""
        for entry in entries:
            if entry.name in self._states:
                state = self._states[entry.name]
                state.steps = max(state.steps, self.warm_up_steps)
                state.q = self._first_q(entry)

    def state_of(self, entry: Entry) -> MatrixState:
        """Return the state of a parameter that is compressed, with an error."""
        state = self._states[entry.name]
        if state.error is None:
            state.error = state.q.new_zeros(matrix_shape(entry))
        return state

    def _is_worth(self, entry: Entry) -> bool:
        if len(entry.shape) < 2 or not entry.dtype.is_floating_point:
            return False
        return _WORTH * self.rank * sum(matrix_shape(entry)) <= entry.param.numel()

    def _columns(self, entry: Entry) -> int:
        return min(self.rank, *matrix_shape(entry))

    def _first_q(self, entry: Entry) -> Tensor:
        """Return a random Q, the same on every rank."""
        generator = torch.Generator().manual_seed(entry.index)
        _, columns = matrix_shape(entry)
        # Not orthogonal: only its span matters.
        shape = (columns, self._columns(entry))
        return _beside(
            entry, torch.randn(shape, generator=generator, dtype=_arithmetic(entry.dtype))
        )


def stateless(compression: type[Compressor] | Compressor) -> type[Compressor]:
    """Return the compression, where only one without state can be used (Adasum)."""
    if isinstance(compression, type):
        return compression
    raise InvalidArgumentError(
        f"DistributedOptimizer: op=Adasum combines steps, and {compression!r} is for gradients. Use Average, or "
        "Compression.fp16 or .bf16."
    )


def describe(compression: type[Compressor] | Compressor) -> str:
    """Return the compression's name, the same on every rank."""
    if isinstance(compression, PowerSGD):
        return repr(compression)
    # An object's own `repr` may hold its address, which is no difference between ranks.
    return (compression if isinstance(compression, type) else type(compression)).__name__


def _beside(entry: Entry, values: Tensor) -> Tensor:
    """Return values on the device of the parameter."""
    if values.device == entry.param.device:
        return values
    return entry.param.new_empty(values.shape, dtype=values.dtype).copy_(values)


def matrix_shape(entry: Entry) -> tuple[int, int]:
    """Return rows and columns of the gradient as a matrix: its first dimension, all others."""
    rows = entry.shape[0]
    return rows, entry.param.numel() // rows


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
