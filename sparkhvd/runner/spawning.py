"""Pickling for processes that multiprocessing spawns from a trainer, such as a DataLoader's.

A spawned process imports the `__main__` of its parent, which is the trainer's module here and not the user's script.
So objects of the user's `__main__` travel by value, in both directions; cloudpickle gives such classes a number by which
both sides recognize them.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

__all__ = ["pickle_main_by_value"]


def pickle_main_by_value(dumps: Callable[[object], bytes]) -> None:
    """Let multiprocessing pickle classes and functions of the user's `__main__` by value from now on.

    Args:
        dumps: pickles such an object by value.
    """

    def reduce(_: object, value: object) -> Any:
        if (
            isinstance(value, (type, FunctionType))
            and value.__module__ == "__main__"
            and not _is_importable(value)
        ):
            return pickle.loads, (dumps(value),)
        return NotImplemented

    # Pickle does not look up classes and functions in its dispatch table.
    ForkingPickler.reducer_override = reduce  # type: ignore[method-assign]


def _is_importable(value: type | FunctionType) -> bool:
    """Return True if `__main__` has the object under its name, as pickle expects."""
    named: object = sys.modules["__main__"]
    for name in value.__qualname__.split("."):
        named = getattr(named, name, None)
    return named is value
