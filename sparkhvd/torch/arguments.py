"""Arguments as users give them: numbers of any kind, lists of any kind, or an `InvalidArgumentError`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparkhvd.errors import InvalidArgumentError

__all__ = ["check_compression", "to_factor", "to_integer", "to_integers", "to_list"]

_Item = TypeVar("_Item")


def to_integer(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else, and for a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # torch: of tensors that are not on the CPU
        return None


def to_integers(values: Iterable[Any]) -> list[int] | None:
    """As `to_integer`, of all of them; None if one is no integer."""
    numbers = [to_integer(value) for value in values]
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def to_factor(what: str, argument: str, value: Any) -> float:
    """A number of Python, numpy or torch as it is now: a tensor may change, and operations are remembered by factors.

    Raises:
        InvalidArgumentError: it is no number.
    """
    try:
        if not isinstance(value, (str, bytes, bytearray)):  # float() would read them
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        pass
    raise InvalidArgumentError(f"{what}: {argument}={value!r} is not one number. Give a float.")


def to_list(what: str, items: Iterable[_Item], of: str = "tensors") -> list[_Item]:
    """A list or anything that can be gone through once, as a list of its own.

    Raises:
        InvalidArgumentError: it cannot be gone through.
    """
    try:
        each = iter(items)
    except TypeError:
        raise InvalidArgumentError(
            f"{what}: expected a list of {of}, got {type(items).__name__}. Put it into a list."
        ) from None
    return list(each)


def check_compression(what: str, compression: Any) -> None:
    """Raise an InvalidArgumentError for what cannot compress."""
    parts = (getattr(compression, "compress", None), getattr(compression, "decompress", None))
    if not all(callable(part) for part in parts):
        raise InvalidArgumentError(
            f"{what}: compression={compression!r} has no compress() and decompress(). Give hvd.Compression.none, "
            ".fp16 or .bf16, or a class of your own that has them."
        )
