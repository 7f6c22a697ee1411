"""torch's reductions as the engine's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from sparkhvd.engine.engine import ReduceOp, Reduction
from sparkhvd.errors import InvalidArgumentError

__all__ = ["SIMPLE_BY_HASH", "reduction_of"]

_Type: Any = dist.ReduceOp.RedOpType  # torch's stub knows no members
_SIMPLE = {
    _Type.SUM: Reduction(ReduceOp.SUM),
    _Type.AVG: Reduction(ReduceOp.AVERAGE),
    _Type.MIN: Reduction(ReduceOp.MIN),
    _Type.MAX: Reduction(ReduceOp.MAX),
    _Type.PRODUCT: Reduction(ReduceOp.PRODUCT),
    _Type.BAND: Reduction(ReduceOp.BIT_AND),
    _Type.BOR: Reduction(ReduceOp.BIT_OR),
    _Type.BXOR: Reduction(ReduceOp.BIT_XOR),
}
# A ReduceOp's hash is its kind; asking for that and looking it up takes three times as long.
SIMPLE_BY_HASH = {hash(dist.ReduceOp(kind)): reduction for kind, reduction in _SIMPLE.items()}
_LINEAR = (_Type.SUM, _Type.AVG, _Type.PREMUL_SUM)


def reduction_of(what: str, op: Any, tensor: Tensor) -> Reduction:
    """Return the engine's reduction of torch's for a tensor like this.

    Raises:
        InvalidArgumentError: it has no meaning for the tensor's numbers.
    """
    kind = op.op
    if tensor.is_complex() and kind not in _LINEAR:
        raise InvalidArgumentError(
            f"{what}: op is {kind.name}, which complex numbers do not have. Use SUM or AVG, or send "
            "torch.view_as_real(tensor)."
        )
    found = _SIMPLE.get(kind)
    if found is not None:
        return found
    if kind == _Type.PREMUL_SUM:
        return Reduction(ReduceOp.SUM, prescale=float(op.__getstate__()[1]))
    raise InvalidArgumentError(
        f"{what}: op {kind.name} is not known. Use SUM, AVG, MIN, MAX, PRODUCT, PREMUL_SUM, BAND, BOR or BXOR."
    )
