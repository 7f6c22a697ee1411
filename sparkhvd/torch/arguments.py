"""Convert users' numbers and lists, also of other libraries, or raise an `InvalidArgumentError`."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError

_Item = TypeVar("_Item")


def to_integer(value: object) -> int | None:
    """Convert an integer of Python, numpy or torch, or return None for a bool and for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    if not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # torch raises a RuntimeError for tensors off the CPU
        return None


def to_integers(values: Iterable[object]) -> list[int] | None:
    """Convert each value as `to_integer` does, or return None if any of them is not an integer."""
    numbers = [to_integer(value) for value in values]
    integers = [number for number in numbers if number is not None]
    return integers if len(integers) == len(numbers) else None


def to_factor(what: str, argument: str, value: object) -> float:
    """Convert a number of Python, numpy or torch to a float, for the key of the operation cache.

    Raises:
        InvalidArgumentError: it is not a number.
    """
    try:
        if isinstance(value, (SupportsFloat, SupportsIndex)):  # float() would also read strings
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises RuntimeError
        pass
    raise InvalidArgumentError(f"{what}: {argument}={value!r} is not one number. Give a float.")


def to_list(what: str, items: Iterable[_Item], of: str = "tensors") -> list[_Item]:
    """Copy an iterable into a list.

    Raises:
        InvalidArgumentError: it is not iterable.
    """
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidArgumentError(
            f"{what}: expected a list of {of}, got {type(items).__name__}. Put it into a list."
        ) from None
    return list(iterator)


def check_compression(what: str, compression: object) -> None:
    """Raise an `InvalidArgumentError` for a compression without `compress()` and `decompress()`."""
    parts = (getattr(compression, "compress", None), getattr(compression, "decompress", None))
    if not all(callable(part) for part in parts):
        raise InvalidArgumentError(
            f"{what}: compression={compression!r} has no compress() and decompress(). Give hvd.Compression.none, "
            ".fp16 or .bf16, or a class of your own that has them."
        )


# ----------------------------------------------------------------------------------------------------
# Exclusion of functions and classes from TorchDynamo.
# In the forward pass of a compiled DDP model, or in `backward()` of a compiled training step, torch's C++ calls our
# functions while Dynamo compiles their caller. Dynamo must not trace them.


def leave_untraced(*parts: Any) -> None:
    """Exclude functions, the methods of classes, and their callees from TorchDynamo.

    Does not import Dynamo, because the import takes seconds.
    """
    frames: Any = torch._C._dynamo.eval_frame
    functions = [each for part in parts for each in _functions(part)]
    for each in functions:
        each._torchdynamo_disable = True  # for a function that Dynamo would inline
    if not hasattr(frames, "set_code_exec_strategy"):  # torch before 2.7
        return
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in functions:
        for code in _codes(each.__code__):
            frames.set_code_exec_strategy(code, skip)


def _functions(part: Any) -> list[Any]:
    if isinstance(part, types.FunctionType):
        return [part]
    return [each for each in vars(part).values() if isinstance(each, types.FunctionType)]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code objects of a function and its nested functions."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)
