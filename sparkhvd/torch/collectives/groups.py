"""Groups of tensors of several element types: one operation per type and plane (CPU, GPU), and all of them or none.

Each operation carries a digest of the whole group, so where the ranks' groups differ in anything, every operation that
all ranks have is refused on all of them. There always is one: the first has the group's own name. An operation that
only some ranks have never runs, and stays in flight until its timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from torch import Tensor

from sparkhvd.engine.engine import DType, ReduceOp, Reduction
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.collectives.handles import Operation
from sparkhvd.torch.collectives.tensors import by_dtype

__all__ = ["start_group"]

_FLOATS = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}

# Part of the digest: whether a tensor is on a GPU.
_GPU: tuple[tuple[str, ...], ...] = ((), ("gpu",))

# Submits the tensors at these places, all of one element type and plane, under a name and with a digest.
Start = Callable[[str, DType, list[int], tuple[int, ...]], Operation]


def start_group(
    name: str,
    tensors: Sequence[Tensor],
    start: Start,
    reduction: Reduction | None = None,
    first_dimensions_differ: bool = False,
) -> list[Operation]:
    """Submit a group as one operation per element type and plane; usually that is one.

    Args:
        name: of the group.
        tensors: the group.
        start: submits a part.
        reduction: of the kinds that reduce.
        first_dimensions_differ: True if they may, between ranks, as in an allgather.
    """
    parts = by_dtype(name, tensors)
    digest: tuple[int, ...] = ()
    if len(parts) > 1:
        if reduction is not None:
            _check(name, [dtype for dtype, _ in parts], reduction)
        kinds = [
            (str(x.dtype), tuple(x.shape[int(first_dimensions_differ) :]), *_GPU[not x.is_cpu])
            for x in tensors
        ]
        whole = hashlib.sha256(repr(kinds).encode()).digest()
        digest = (int.from_bytes(whole[:7], "little"),)
    started: list[Operation] = []
    for (dtype, is_cpu), indices in parts.items():
        part = name
        if started:
            part = f"{name}.{dtype.name.lower()}{'' if is_cpu else '.gpu'}"
        started.append(start(part, dtype, indices, digest))
    return started


def _check(name: str, dtypes: Sequence[DType], reduction: Reduction) -> None:
    """Refuse reductions that the engine would refuse for one part only, when the others are in flight."""
    is_plain = reduction == Reduction(reduction.op) and reduction.op != ReduceOp.AVERAGE
    for dtype in dtypes:
        if dtype == DType.BOOL and not is_plain:
            raise InvalidArgumentError(
                f"{name}: one of the tensors is bool, which has no Average and cannot be scaled. Use Sum or Max "
                'for "or", or convert it.'
            )
        if reduction.op == ReduceOp.ADASUM and dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"{name}: Adasum needs floating-point tensors, and one is {dtype.name.lower()}."
            )
