"""Pickle functions and results by value, so that those of `__main__` and of notebook cells travel too."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
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
    """Pickle a call as (names of modules, fn, args, kwargs, backend).

    The names are those that `fn` is seen to need: where it is pickled by reference, nothing else in the pickle tells of them. The backend is
    that of torch.distributed, where this process has it: who imports it need not name it in `fn`.
    """
    backend = sys.modules.get("sparkhvd.distributed")
    return dumps((_names_in(fn), fn, args, kwargs, backend))


def _inside(fn: Callable[..., object]) -> Callable[..., object] | None:
    """Return the function that an object without code of its own calls, if it says so."""
    if isinstance(fn, functools.partial):
        return fn.func
    return None if hasattr(fn, "__code__") else getattr(fn, "__wrapped__", None)


def _names_in(fn: Callable[..., object]) -> tuple[str, ...]:
    """List names in the code of a function, and the modules that its own module has imported."""
    while (inner := _inside(fn)) is not None:
        fn = inner
    fn = getattr(fn, "__func__", fn)
    names: set[str] = set()
    codes = [code] if isinstance(code := getattr(fn, "__code__", None), CodeType) else []
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if isinstance(module, ModuleType) and module.__name__ != "__main__":  # which no rank imports
        names |= {
            value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)
        }
    return tuple(sorted(names))
