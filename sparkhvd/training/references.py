"""Search for all objects referenced by a user's loss, metric or step function."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import operator
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import cloudpickle
from torch import Tensor, nn

# Objects of these libraries (data, sessions, loggers) are not searched. Only torch modules are, for their registered
# parts.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchmetrics", "sparkhvd", "cloudpickle"}
_LIBRARIES |= {"numpy", "pandas", "polars", "pyarrow", "pyspark", "py4j", "lightning_utilities"}
_DEEPEST = 16
_MOST_OBJECTS = 10_000
# Limit per list or dict.
_MOST_ENTRIES = 1_000
_SEQUENCES = (list, tuple, collections.deque)
_MAPPINGS = (dict, types.MappingProxyType)
# Classes of the standard library whose objects are searched.
_OPEN = (
    types.FunctionType,
    types.MethodType,
    types.SimpleNamespace,
    functools.partial,
    staticmethod,
    classmethod,
    property,
    *_SEQUENCES,
    *_MAPPINGS,
)
_OF_MODULES = frozenset(vars(nn.Module()))

# Name and object of a part.
_Part = tuple[str, object]


class Reference(NamedTuple):
    """Object referenced by a callable.

    Attributes:
        path: names of attributes, keys and variables from the callable to the object, the same in every process; "" for
            the callable itself.
        value: the object.
        is_own: True if the object is the callable or a part of it; False if only the code of a function refers to it.
    """

    path: str
    value: object
    is_own: bool


def references(root: object, left_out: Collection[int] = ()) -> Iterator[Reference]:
    """Yield the callable, then its parts, then the objects referenced by its code.

    Each object is yielded once. The search follows closures, default arguments, globals that a pickle holds by value,
    attributes, slots, and entries of lists and dicts, but not sets, which have no order. A module is yielded without
    the parts registered with torch: its parameters, buffers and modules. The search ends at a fixed depth and number of
    objects.

    Args:
        root: the callable.
        left_out: ids of objects to skip.
    """
    seen = set(left_out)
    paths: set[str] = set()
    own: list[tuple[str, object, int]] = [("", root, 0)]
    named: list[tuple[str, object, int]] = []
    for _ in range(_MOST_OBJECTS):
        while (todo := own or named) and id(todo[-1][1]) in seen:
            todo.pop()
        if not todo:
            return
        is_own = todo is own
        path, value, depth = todo.pop()
        seen.add(id(value))
        yield Reference(path, value, is_own)
        if isinstance(value, nn.Module):
            seen.update(map(id, itertools.chain(value.modules(), value.parameters())))
        if depth == _DEEPEST:
            continue
        for parts, stack in ((_has(value), own if is_own else named), (_names(value), named)):
            new = [(name, each) for name, each in parts if _is_looked_at(each)]
            found = [(_free(path, name, paths), each, depth + 1) for name, each in new]
            stack.extend(reversed(found))


def _free(path: str, name: str, taken: set[str]) -> str:
    """Join a name to a path, with a number if the result is taken.

    Example: the keys 1 and "1" of a dict.
    """
    if not name:
        return path
    numbers = (f"{_joined(path, name)}_{i}" for i in itertools.count(2))
    candidates = itertools.chain([_joined(path, name)], numbers)
    full = next(each for each in candidates if each not in taken)
    taken.add(full)
    return full


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _is_looked_at(value: object) -> bool:
    if isinstance(value, types.FunctionType):
        return not _is_of_library(value)
    if isinstance(value, type):
        return not _is_of_library(value) and is_by_value(value)
    return (
        isinstance(value, (Tensor, nn.Module, *_OPEN))
        or not _is_of_library(type(value))
        or _is_our_wrapper(value)
    )


def _is_of_library(value: types.FunctionType | type) -> bool:
    return _home(value).partition(".")[0] in _LIBRARIES


def _is_our_wrapper(value: object) -> bool:
    """Whether a value is this package's wrapper around a user's function."""
    return callable(value) and _home(type(value)).startswith("sparkhvd.")


def _home(value: types.FunctionType | type) -> str:
    return str(getattr(value, "__module__", None) or "__main__")


def is_of_users_class(value: object) -> bool:
    """Whether an object's class belongs neither to a library nor to an installed package."""
    kind = type(value)
    if isinstance(value, type):
        return False
    file = str(getattr(sys.modules.get(_home(kind)), "__file__", None) or "")
    is_installed = any(f"{name}-packages" in file for name in ("site", "dist"))
    return not (_is_of_library(kind) or is_installed)


# --- parts ------------------------------------------------------------------------------------------------------


def _has(value: object) -> Iterator[_Part]:
    """Yield the parts of an object."""
    if isinstance(value, (Tensor, property)):
        return
    if isinstance(value, nn.Module):
        for path, part in value.named_modules():
            if not _is_of_library(type(part)):
                values = ((n, each) for n, each in vars(part).items() if n not in _OF_MODULES)
                yield from ((_joined(path, n), each) for n, each in values)
                yield path, type(part)
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from _numbered(value.args)
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _plain(vars(value))
    elif isinstance(value, type):
        yield from ((n, v) for n, v in _class_attributes(value) if not _is_method(v))
    elif _is_our_wrapper(value):
        yield from itertools.islice(
            (("", each) for each in getattr(value, "__dict__", {}).values() if callable(each)), 1
        )
    else:
        yield from _of_object(value)


def _of_object(value: object) -> Iterator[_Part]:
    """Yield entries, attributes and slots."""
    if isinstance(value, _SEQUENCES):
        yield from _numbered(value)
    elif isinstance(value, _MAPPINGS):
        items = dict.items(value) if isinstance(value, dict) else value.items()
        for i, (key, each) in enumerate(itertools.islice(items, _MOST_ENTRIES)):
            yield str(key) if isinstance(key, (str, int, float)) else str(i), each
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from _plain(attributes)
    if not _is_of_library(type(value)):
        for kind in type(value).__mro__:
            for name, slot in vars(kind).items() if not _is_of_library(kind) else ():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                    yield name, getattr(value, name)
        yield "", type(value)


def _numbered(values: Iterable[object]) -> Iterator[_Part]:
    return ((str(i), each) for i, each in enumerate(itertools.islice(values, _MOST_ENTRIES)))


def _plain(attributes: dict[str, object]) -> Iterator[_Part]:
    return ((str(n), each) for n, each in attributes.items() if not str(n).startswith("__"))


def _class_attributes(kind: type) -> Iterator[_Part]:
    """Yield attributes and methods of a class and its bases, if a pickle holds the class by value."""
    for base in kind.__mro__:
        if _is_looked_at(base):
            parts = [
                (name, each)
                for name, each in vars(base).items()
                if _is_method(each) or not name.startswith("__")
            ]
            yield from sorted(parts, key=operator.itemgetter(0))


def _is_method(value: object) -> bool:
    return isinstance(value, (types.FunctionType, staticmethod, classmethod, property))


def _names(value: object) -> Iterator[_Part]:
    """Yield the objects named in the code of a function or of a class's methods."""
    if isinstance(value, types.MethodType):
        yield "", value.__func__
    elif isinstance(value, type):
        yield from ((n, v) for n, v in _class_attributes(value) if _is_method(v))
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, types.FunctionType):
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # an empty closure cell
                continue
        defaults = value.__defaults__ or ()
        taken = code.co_varnames[: code.co_argcount]
        yield from zip(taken[len(taken) - len(defaults) :], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()
        if is_by_value(value):
            yield from sorted(named_globals(value).items(), key=operator.itemgetter(0))


def named_globals(function: types.FunctionType) -> dict[str, object]:
    """Find the globals used by a function and its nested functions, by name."""
    names = _global_names(function.__code__) & {*function.__globals__}
    return {name: function.__globals__[name] for name in names}


def _global_names(code: types.CodeType) -> set[str]:
    # Read the instructions, because `co_names` also has names of attributes.
    own = {i.argval for i in dis.get_instructions(code) if i.opname.endswith("_GLOBAL")}
    inner = (_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return own.union(*inner)


def is_by_value(value: Any) -> bool:
    """Whether a pickle holds a function or a class by value, with its globals or attributes.

    Args:
        value: a function, also one with a cache, or a class.
    """
    home = _home(value)
    registered = cloudpickle.list_registry_pickle_by_value()
    if home == "__main__" or any(f"{home}.".startswith(f"{name}.") for name in registered):
        return True
    found: object = sys.modules.get(home)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not value
