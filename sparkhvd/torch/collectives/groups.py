"""Groups of several element types, which are one operation per type: agreed on as a whole before any part runs.

Each rank sends a digest of the whole group under the group's own name. If all are equal, every rank submits the same
parts; if not, nobody submits any, and nothing is read or written. A rank whose group has one type submits that under
the same name, and the engine finds that the ranks disagree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparkhvd.engine import DType, ReduceOp, Work
from sparkhvd.errors import InvalidArgumentError, MismatchError
from sparkhvd.torch._context import Context
from sparkhvd.torch.collectives.handles import Handle
from sparkhvd.torch.collectives.tensors import DTYPES, by_dtype, view

__all__ = ["start_group"]

_DIGEST_BITS = 24  # the square of one, summed over ranks, is far from the end of 64 bits
_DIGESTS = 2
_FLOATS = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}


def start_group(
    ctx: Context,
    name: str,
    tensors: Sequence[Tensor],
    start: Callable[[str, DType, list[int]], Work],
    handle: Callable[[Sequence[Work], Callable[[], Sequence[Work]] | None], Handle],
    process_set: int,
    reduction: tuple[ReduceOp, float, float] = (ReduceOp.SUM, 1.0, 1.0),
    first_dimensions_differ: bool = False,
) -> Handle:
    """Submit a group: at once if it has one element type.

    Args:
        ctx: whose engine.
        name: of the group.
        tensors: the group.
        start: submits the tensors of one element type, given as places in `tensors`, under a name.
        handle: makes the handle from the works so far and from what submits the rest.
        process_set: its number.
        reduction: of the group, with the factors before and after it.
        first_dimensions_differ: between ranks, as in an allgather.
    """
    parts = by_dtype(name, tensors)
    if len(parts) <= 1:
        return handle([start(name, dtype, indices) for dtype, indices in parts.items()], None)
    _check(name, list(parts), *reduction)
    kinds = [(str(x.dtype), tuple(x.shape[int(first_dimensions_differ) :])) for x in tensors]
    mine = _digest(kinds)
    sums = torch.tensor([1, *mine, *(d * d for d in mine)], dtype=torch.int64)
    call = ctx.engine.prepare_allreduce(
        (view(sums, sums),), DTYPES[torch.int64], ReduceOp.SUM, 1.0, 1.0, process_set
    )

    def start_parts() -> Sequence[Work]:
        count, *values = sums.tolist()
        # All are equal if the mean of the squares is the square of the mean.
        for total, squares in zip(values[:_DIGESTS], values[_DIGESTS:], strict=True):
            if count * squares != total * total:
                raise MismatchError(
                    f"{name}: the ranks gave groups that differ in the tensors' number, dtypes, order or shapes. "
                    f"This rank gave {_shown(kinds)}. Give the same on every rank."
                )
        return [
            start(f"{name}.{dtype.name.lower()}", dtype, indices)
            for dtype, indices in parts.items()
        ]

    return handle([ctx.engine.start(call, name, sums)], start_parts)


def _check(
    name: str, dtypes: Sequence[DType], op: ReduceOp, prescale: float, postscale: float
) -> None:
    """Refuse what the engine would refuse for one of the parts only, when the others are on their way."""
    for dtype in dtypes:
        if dtype == DType.BOOL and (op == ReduceOp.AVERAGE or (prescale, postscale) != (1.0, 1.0)):
            raise InvalidArgumentError(
                f"{name}: one of the tensors is bool, which has no Average and cannot be scaled. Use Sum or Max "
                'for "or", or convert it.'
            )
        if op == ReduceOp.ADASUM and dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"{name}: Adasum needs floating-point tensors, and one is {dtype.name.lower()}."
            )
    if math.isnan(prescale) or math.isnan(postscale):
        raise InvalidArgumentError(
            f"{name}: prescale and postscale must be numbers, and one is NaN."
        )


def _digest(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[int]:
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    size = _DIGEST_BITS // 8
    return [int.from_bytes(digest[i * size : (i + 1) * size], "little") for i in range(_DIGESTS)]


def _shown(kinds: Sequence[tuple[str, tuple[int, ...]]], most: int = 8) -> str:
    shown = ", ".join(
        f"{dtype.removeprefix('torch.')} {list(shape)}" for dtype, shape in kinds[:most]
    )
    return shown + (f" and {len(kinds) - most} more" if len(kinds) > most else "")
