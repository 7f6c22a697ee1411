"""Pickle functions and results by value, so that those of `__main__` and of notebook cells travel too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["cloudpickle", "dump_program", "dumps"]


def cloudpickle() -> Any:
    """Return pyspark's cloudpickle, or else the package of that name."""
    try:
        return importlib.import_module("pyspark.cloudpickle")
    except ImportError:
        return importlib.import_module("cloudpickle")


def dumps(value: object) -> bytes:
    """Pickle by value."""
    data: bytes = cloudpickle().dumps(value)
    return data


def dump_program(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bytes:
    """Pickle a call, and the backend of torch.distributed where this process has it: who imports it need not name it in `fn`."""
    return dumps((fn, args, kwargs, sys.modules.get("sparkhvd.distributed")))
