"""Arguments of reductions: checked once by the public functions, then passed on as one `Request`."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from sparkhvd.engine.engine import ReduceOp, Reduction
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_factor
from sparkhvd.torch.collectives.tensors import gradient_name
from sparkhvd.torch.context import context
from sparkhvd.torch.process_sets import ProcessSet, set_id

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Request",
    "Sum",
    "check_linear",
    "resolve_op",
    "to_op",
    "to_request",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
_NAMED = (Average, Sum, Adasum, Min, Max, Product)  # the engine has more

# Most reductions have no factors; making these anew for each would cost time.
_WITHOUT_FACTORS = {op: Reduction(op) for op in ReduceOp}


class Request(NamedTuple):
    """A reduction as a caller asked for it.

    Attributes:
        kind: of operation, as its name begins: "allreduce", "grouped_allreduce", ...
        name: the caller's; None numbers the operation.
        reduction: operation and factors.
        process_set: the ranks that take part.
    """

    kind: str
    name: str | None
    reduction: Reduction
    process_set: ProcessSet

    def of_gradient(self) -> Request:
        """Return the request of the backward pass, named after this one."""
        return self._replace(name=gradient_name(self.name))


def to_request(
    kind: str,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Request:
    """Return the arguments of a public function as one value.

    Raises:
        InvalidArgumentError: a factor is not a number.
    """
    # Nearly always both are floats, and calls cost time.
    if type(prescale_factor) is not float or type(postscale_factor) is not float:
        try:
            prescale_factor = to_factor(kind, "prescale_factor", prescale_factor)
            postscale_factor = to_factor(kind, "postscale_factor", postscale_factor)
        except InvalidArgumentError as error:
            # The refused operation takes its number, or this rank's next ones would meet the others' earlier ones.
            operation = context().name(kind, name, set_id(process_set))
            raise InvalidArgumentError(f"{operation}{str(error).removeprefix(kind)}") from None
    if prescale_factor == postscale_factor == 1.0:
        reduction = _WITHOUT_FACTORS[op]
    else:
        reduction = Reduction(op, prescale_factor, postscale_factor)
    # A named tuple's own constructor takes twice the time.
    return tuple.__new__(Request, (kind, name, reduction, process_set))


def resolve_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Return the reduction that `op`, or its deprecated predecessor `average`, asks for."""
    if average is None:
        if op is None:
            return Average
        return op if type(op) is ReduceOp else to_op(op)
    if op is not None:
        raise InvalidArgumentError(
            f"average={average!r} and op={op!r} were both given. op replaces average: give op alone."
        )
    warnings.warn(
        "average= is deprecated; give op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def to_op(op: ReduceOp | int) -> ReduceOp:
    """Return the reduction of one of `hvd.Average`, `hvd.Sum`, ... or of its number."""
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{each.name.title()}" for each in _NAMED)
        raise InvalidArgumentError(f"op={op!r} is no reduction. Give one of {names}.") from None


def check_linear(operation: str, op: ReduceOp) -> None:
    """Refuse the gradient of a reduction that is not linear."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(
            f"{operation}(op={op.name.title()}) has no gradient. Use Average or Sum, or detach the tensor."
        )
