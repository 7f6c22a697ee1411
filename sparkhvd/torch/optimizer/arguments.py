"""Checks and conversion of the arguments of `DistributedOptimizer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkhvd.engine.library import ReduceOp
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.torch.arguments import to_factor, to_integer, to_list
from sparkhvd.torch.collectives import Average
from sparkhvd.torch.compressors import Compressor
from sparkhvd.torch.process_sets import ProcessSet


@dataclass
class Configuration:
    """The checked arguments of a `DistributedOptimizer`.

    Attributes:
        op: the reduction.
        predivide: divisor of every rank's gradient; the result is multiplied by it.
        compression: compression of the gradients.
        passes: backward passes per step; may be changed between steps.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the reducing ranks.
        number: the engine's number of the process set.
        ranks: global ranks of the process set, ascending.
        as_views: whether gradients are views of registered memory.
        share_parameters: whether the ranks of a host share one copy of the parameters.
        wait_in_backward: whether the last backward pass waits for the reduced gradients.
    """

    op: ReduceOp
    predivide: float
    compression: type[Compressor] | Compressor
    passes: int
    sparse_as_dense: bool
    process_set: ProcessSet
    number: int
    ranks: tuple[int, ...]
    as_views: bool
    share_parameters: bool
    wait_in_backward: bool


def placed(groups: Sequence[Mapping[str, Iterable[Tensor]]]) -> list[tuple[int, int, Tensor]]:
    """List (group number, position in the group, parameter) for the parameters of an optimizer."""
    return [
        (number, index, parameter)
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    ]


def check_arguments(op: ReduceOp, passes: int, predivide: float) -> tuple[int, float]:
    """Check `passes` and `predivide`, and return them as plain numbers.

    Raises:
        InvalidArgumentError: a number is out of range, or a predivide factor is given without Average.
    """
    number = to_integer(passes)
    if number is None or number < 1:
        raise InvalidArgumentError(
            f"DistributedOptimizer: backward_passes_per_step is {passes!r}; it must be an integer of 1 or more."
        )
    factor = to_factor("DistributedOptimizer", "gradient_predivide_factor", predivide)
    if factor != 1.0 and op is not Average:
        raise InvalidArgumentError(
            f"DistributedOptimizer: gradient_predivide_factor={factor} needs op=Average, "
            f"got {op.name.title()}."
        )
    # Gradients are multiplied with the factor and with its reciprocal, so both must be finite.
    if not (factor > 0 and math.isfinite(factor) and math.isfinite(1 / factor)):
        raise InvalidArgumentError(
            f"DistributedOptimizer: gradient_predivide_factor is {factor}; it and 1 divided by it must be "
            "finite and more than 0."
        )
    return number, factor


def parameter_names(
    parameters: list[tuple[int, int, Tensor]],
    named_parameters: Iterable[tuple[str, Tensor]] | None,
) -> dict[Tensor, str]:
    """Name every parameter of the optimizer, in the optimizer's order."""
    if named_parameters is None:
        return {p: f"allreduce.noname.{group}.{index}" for group, index, p in parameters}
    named = to_list(
        "DistributedOptimizer(named_parameters=...)", named_parameters, "(name, parameter) pairs"
    )
    for item in named:
        if not (
            isinstance(item, tuple)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], Tensor)
        ):
            raise InvalidArgumentError(
                f"DistributedOptimizer: named_parameters holds {_kind(item)}; it must hold "
                "(name, parameter) pairs, as from model.named_parameters()."
            )
    names = [name for name, _ in named]
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if twice:
        raise InvalidArgumentError(
            f"DistributedOptimizer: named_parameters uses {', '.join(map(repr, twice))} more than once. "
            "Give every parameter a unique name."
        )
    by_parameter = {p: name for name, p in named}
    unnamed = [f"{group}.{index}" for group, index, p in parameters if p not in by_parameter]
    if unnamed:
        raise InvalidArgumentError(
            f"DistributedOptimizer: {len(unnamed)} of the optimizer's {len(parameters)} parameters are not in "
            f"named_parameters (group.index {', '.join(unnamed[:5])}). Name all of them, or give None."
        )
    return {p: by_parameter[p] for _, _, p in parameters}


def group_numbers(
    groups: int | Sequence[Sequence[Tensor]] | None, parameters: list[Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Convert the argument `groups` to tuples of parameter numbers."""
    if groups is None:
        return ()
    wanted = to_integer(groups)
    if wanted is not None:
        if wanted < 1:
            raise InvalidArgumentError(
                f"DistributedOptimizer: groups is {groups}; give 1 or more, or None for buckets by size."
            )
        count = len(parameters)
        wanted = max(1, min(wanted, count))  # further groups would be empty
        bounds = [count * i // wanted for i in range(wanted + 1)]
        return tuple(tuple(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False) if a < b)
    numbers = {p: index for index, p in enumerate(parameters)}
    seen: set[Tensor] = set()
    lists = group_lists(groups)
    for group in lists:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise _no_groups(f"holds {_kind(parameter)} in one of its lists")
            if parameter in seen:
                raise InvalidArgumentError(
                    f"DistributedOptimizer: a parameter of shape {tuple(parameter.shape)} appears twice in groups."
                )
            seen.add(parameter)
    known = [tuple(numbers[p] for p in group if p in numbers) for group in lists]
    return tuple(group for group in known if group)


def _kind(value: object) -> str:
    """Describe a value's type, or the types in a tuple."""
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def group_lists(groups: object) -> list[list[Tensor]]:
    """Convert `groups`, an iterable of iterables, to lists of parameters."""
    if isinstance(groups, (bool, str, Tensor)) or not isinstance(groups, Iterable):
        raise _no_groups(f"is {groups!r}")
    lists: list[list[Tensor]] = []
    for group in groups:
        # A tensor is iterable too, but its rows are not parameters.
        if isinstance(group, (str, Tensor)) or not isinstance(group, Iterable):
            raise _no_groups(f"holds {_kind(group)}")
        lists.append(list(group))
    return lists


def _no_groups(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"DistributedOptimizer: groups {problem}; it must be an integer of 1 or more, or lists of parameters. Give "
        "[[parameter, ...], ...], or None for buckets by size."
    )
