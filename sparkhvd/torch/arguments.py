"""Conversion of users' arguments: numbers and lists of other libraries, or an `InvalidArgumentError`."""

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
    """Take integers of Python, numpy or torch; None for anything else, and for a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    if not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # torch: of tensors that are not on the CPU
        return None


def to_integers(values: Iterable[object]) -> list[int] | None:
    """Convert each value as `to_integer` does; None if any of them is not an integer."""
    numbers = [to_integer(value) for value in values]
    integers = [number for number in numbers if number is not None]
    return integers if len(integers) == len(numbers) else None


def to_factor(what: str, argument: str, value: object) -> float:
    """Convert a number of Python, numpy or torch to a float, because operations are cached by their factors.

    Raises:
        InvalidArgumentError: it is not a number.
    """
    try:
        if isinstance(value, (SupportsFloat, SupportsIndex)):  # float() would also read strings
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
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
# Functions and classes that TorchDynamo must not trace.
# torch's C++ calls them while Dynamo compiles its caller: in the forward pass of a compiled DDP model, or in `backward()` of a compiled
# training step.


def leave_untraced(*parts: Any) -> None:
    """Exclude functions, or the methods of classes, and their callees from Dynamo, without importing Dynamo, which takes seconds."""
    frames: Any = torch._C._dynamo.eval_frame
    functions = [each for part in parts for each in _functions(part)]
    for each in functions:
        each._torchdynamo_disable = True  # what Dynamo would trace into
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
