"""What a trainer hands to processes that multiprocessing spawns, such as a DataLoader's.

A spawned process imports the `__main__` of its parent, which is the trainer's module here and not the user's script.
So what came from the user's `__main__` travels by value. The spawned process does the same with what it sends back;
cloudpickle gives such classes a number by which both sides recognize them.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

__all__ = ["pickle_main_by_value"]


def pickle_main_by_value(dumps: Callable[[Any], bytes]) -> None:
    """Let multiprocessing pickle classes and functions of the user's `__main__` by value from now on.

    Args:
        dumps: pickles such an object by value.
    """

    def reduce(_: object, value: Any) -> Any:
        is_code = isinstance(value, (type, FunctionType)) and value.__module__ == "__main__"
        if is_code and not _is_found(value):
            return pickle.loads, (dumps(value),)
        return NotImplemented

    # Pickle asks its dispatch table for neither classes nor functions.
    ForkingPickler.reducer_override = reduce  # type: ignore[method-assign]


def _is_found(value: Any) -> bool:
    """Whether `__main__` has the object under its name, as pickle expects."""
    found: Any = sys.modules["__main__"]
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
