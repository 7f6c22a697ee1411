"""Attributes of modules, parameters and losses that change during a run, which torch's state dicts leave out.

`model.dropout.p = 0.3`, `model.config["tau"] *= 0.9`, a counter that `forward` counts up, `parameter.lr_scale = 0.1`. A checkpoint holds the values that
differ from the program's, each by the name of the object and the path in it.
"""

from __future__ import annotations

import copy
import datetime
import decimal
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Attributes", "Entry", "can_be_kept", "is_plain", "is_record", "set_attributes"]

# Steps from an object to a value: (".", attribute) or ("[]", key of a dict or index of a list).
Path = tuple[tuple[str, Any], ...]
Key = tuple[str, Path]
# Owner, path, the encoded value (None: it is deleted), and whether it has changed since `begun`.
Entry = list[Any]

_OF_TORCH = frozenset(vars(nn.Module()))
_DEPTH = 5
_CPU = torch.device("cpu")
# A larger array or tensor is looked at only where a callback has set it: `forward` may remember its outputs.
_LARGE_BYTES = 1 << 20
_ABSENT = object()
_FOREIGN = {"torch", "numpy", "pandas", "pyarrow", "pyspark", "py4j", "sparkhvd"}
_SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
_NAMES = {kind: name for name, kind in {**_SEQUENCES, **_MAPPINGS}.items()}
# Values of records that are not kept, and never change in place.
_FIXED = (
    *(Enum, type, FunctionType, BuiltinFunctionType, PurePath, datetime.date, datetime.timedelta),
    *(decimal.Decimal, nn.Module, Tensor),
)
# What several places may hold as one object.
_SHARED = (dict, list, set, deque, Tensor, np.ndarray)


class Attributes:
    """Changes of the attributes of objects."""

    def __init__(self, owners: Callable[[], Mapping[str, object]]) -> None:
        """Take the values of now as those of the program.

        Args:
            owners: returns the objects by name; it is called again whenever they are looked at.
        """
        self._owners = owners
        self._first = self._look()
        self._begun = self._first

    def begun(self) -> None:
        """Note the values that `on_train_begin` has set: every start of a run sets them again."""
        self._begun = self._look()

    def reset(self) -> None:
        """Set everything back to the program's values."""
        self._begun = self._first
        self.load([])

    def changes(self, large: Collection[tuple[str, str]] = ()) -> list[Entry]:
        """Return what differs from the program.

        Args:
            large: (owner, attribute) of values that are kept even if they are large.
        """
        owners = self._owners()
        found = _walk(owners, large)
        entries: list[Entry] = []
        for key, value in found.items():
            if _is(self._first.get(key, _ABSENT), value):
                continue
            is_later = not _is(self._begun.get(key, _ABSENT), value)
            entries.append([key[0], [list(step) for step in key[1]], _encode(value), is_later])
        for key in (self._first.keys() | self._begun.keys()) - found.keys():
            if _parent_has(owners, key):  # of a kind that is not kept
                continue
            is_later = key in self._begun
            if is_later or key in self._first:
                entries.append([key[0], [list(step) for step in key[1]], None, is_later])
        return entries

    def load(self, entries: Iterable[Entry]) -> None:
        """Set what has changed since `on_train_begin`, and set back what has not."""
        owners = self._owners()
        later = [entry for entry in entries if entry[3]]
        wanted = {_key(entry) for entry in later}
        for key in _walk(owners, ()).keys() - self._begun.keys() - wanted:
            _set(owners, key, None)
        for key, before in self._begun.items():
            if key not in wanted and before is not None and not _is(before, _get(owners, key)):
                _set(owners, key, before)
        set_attributes(owners, later)

    def _look(self) -> dict[Key, Any]:
        """Return values by place, encoded; None for a large one."""
        return {
            key: None if _num_bytes(value) > _LARGE_BYTES else _encode(value)
            for key, value in _walk(self._owners(), None).items()
        }


def set_attributes(owners: Mapping[str, object], entries: Iterable[Entry]) -> None:
    """Set values as `Attributes.changes` has returned them; places that are not there are passed over."""
    for entry in entries:
        _set(owners, _key(entry), entry[2])


def _key(entry: Entry) -> Key:
    return entry[0], tuple((str(kind), name) for kind, name in entry[1])


# -- looking ---------------------------------------------------------------------------------------------------------


def _walk(
    owners: Mapping[str, object], large: Collection[tuple[str, str]] | None
) -> dict[Key, object]:
    """Return the values that can be kept, by place; each object once.

    Args:
        owners: objects by name.
        large: attributes whose large values count; None: all.
    """
    found: dict[Key, object] = {}
    seen = {id(owner) for owner in owners.values()}

    def add(key: Key, value: object, depth: int) -> None:
        if id(value) in seen:
            return
        if can_be_kept(value):
            if isinstance(value, _SHARED):
                seen.add(id(value))
            owner, path = key
            is_wanted = large is None or (owner, path[0][1]) in large
            if is_wanted or _num_bytes(value) <= _LARGE_BYTES:
                found[key] = value
        elif depth:
            seen.add(id(value))
            for step, part in _parts(value):
                add((key[0], (*key[1], step)), part, depth - 1)

    for name, owner in owners.items():
        for attribute, value in vars(owner).items():
            if not _is_of_torch(owner, attribute):
                add((name, ((".", attribute),)), value, _DEPTH)
    return found


def _is_of_torch(owner: object, attribute: str) -> bool:
    """Return True for an attribute that is in a state dict, or belongs to torch or to us."""
    if isinstance(owner, torch.optim.Optimizer):
        return attribute.startswith("_") or attribute in ("state", "param_groups")
    is_modules = isinstance(owner, nn.Module) and attribute in _OF_TORCH
    return is_modules or attribute.startswith("_dynamo")


def _parts(value: object) -> list[tuple[tuple[str, Any], object]]:
    """Return what a value holds that cannot be kept as a whole, with the steps to it."""
    if isinstance(value, dict):
        return [(("[]", k), each) for k, each in value.items() if type(k) in (str, int)]
    if isinstance(value, (list, tuple)):
        parts = [(("[]", i), each) for i, each in enumerate(value)]
        # Entries of tuples cannot be set, attributes of these can.
        return [p for p in parts if isinstance(value, list) or not can_be_kept(p[1])]
    if is_record(value):
        return [((".", name), each) for name, each in vars(value).items()]
    return []


def is_record(value: object) -> bool:
    """Check whether a value is an object that holds nothing but values, such as a configuration."""
    return _is_record(value, set(), _DEPTH)


def _is_record(value: object, seen: set[int], depth: int) -> bool:
    if (
        not hasattr(value, "__dict__")
        or callable(value)
        or isinstance(value, (*_FIXED, ModuleType))
        or type(value).__module__.partition(".")[0] in _FOREIGN
    ):
        return False
    seen.add(id(value))
    return all(_is_value(each, seen, depth - 1) for each in vars(value).values())


def _is_value(value: object, seen: set[int], depth: int) -> bool:
    """Check whether a record may hold a value; a lock or a connection makes an object a service, whose values are left alone."""
    if id(value) in seen or can_be_kept(value) or isinstance(value, _FIXED):
        return True
    if not depth:
        return False
    if isinstance(value, (dict, list, tuple)):
        seen.add(id(value))
        parts = value.values() if isinstance(value, dict) else value
        return all(_is_value(each, seen, depth - 1) for each in parts)
    return _is_record(value, seen, depth)


def is_plain(value: object) -> bool:
    """Check whether a value is a number, text, None, or a dict, list or tuple of these."""
    if type(value) is dict:
        return all(is_plain(each) for each in (*value.keys(), *value.values()))
    if type(value) in (list, tuple):
        return all(is_plain(each) for each in value)  # type: ignore[attr-defined]
    return value is None or type(value) in (bool, int, float, complex, str)


def can_be_kept(value: object) -> bool:
    """Check whether a checkpoint can hold a value of an attribute as a whole."""
    if is_plain(value):
        return True
    if isinstance(value, Tensor):
        # Others are of a graph, such as outputs that a layer remembers.
        return type(value) is Tensor and not value.requires_grad and value.layout == torch.strided
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufcSUmM"
    if type(value) in _MAPPINGS.values():
        return all(is_plain(k) and can_be_kept(each) for k, each in value.items())  # type: ignore[attr-defined]
    if type(value) in _SEQUENCES.values():
        return all(map(can_be_kept, value))  # type: ignore[call-overload]
    return isinstance(value, (bytes, torch.dtype, torch.device, torch.Size))


def _num_bytes(value: object) -> int:
    if isinstance(value, (Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return 8 * len(value) if is_plain(value) else sum(map(_num_bytes, value))
    return len(value) if isinstance(value, (str, bytes)) else 0


# -- values ----------------------------------------------------------------------------------------------------------


def _encode(value: Any) -> tuple[Any, ...]:
    """Return a copy of a value as a kind and content, which torch.load reads with weights_only."""
    if isinstance(value, Tensor):
        return "tensor", value.detach().clone(), value.device.type == "cpu"
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return kind, value.dtype.str, list(value.shape), _encode(value.tobytes())
    if isinstance(value, bytes):  # torch.load refuses empty ones
        return "bytes", torch.from_numpy(np.frombuffer(value, np.uint8).copy())
    if isinstance(value, (torch.dtype, torch.device)):
        return type(value).__name__, str(value).removeprefix("torch.")
    if isinstance(value, torch.Size):
        return "Size", list(value)
    if is_plain(value):
        return "value", copy.deepcopy(value)
    kind = _NAMES[type(value)]
    if kind in _MAPPINGS:
        return kind, [[_encode(k), _encode(each)] for k, each in value.items()]
    of_deque = [value.maxlen] if isinstance(value, deque) else []
    entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    return kind, list(map(_encode, entries)), *of_deque


def _decode(encoded: Any, device: torch.device) -> Any:
    """Return the value that was encoded; tensors that were on an accelerator go to the device."""
    kind, content, *more = encoded
    if kind == "tensor":
        return content.clone() if more[0] else content.to(device, copy=True)
    if kind in ("array", "number"):
        shape, data = more
        array = np.frombuffer(_decode(data, device), np.dtype(content)).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind == "bytes":
        return content.numpy().tobytes()
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "Size":
        return torch.Size(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((_decode(k, device), _decode(v, device)) for k, v in content)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]((_decode(each, device) for each in content), *more)
    return copy.deepcopy(content)


def _is(encoded: Any, value: object) -> bool:
    """Check whether a value is the one that was encoded; a large one, whose encoding is None, is not compared."""
    if value is _ABSENT or encoded is _ABSENT:
        return value is encoded
    if encoded is None:
        return _num_bytes(value) > _LARGE_BYTES
    return can_be_kept(value) and _is_same(encoded, _encode(value))


def _is_same(a: Any, b: Any) -> bool:
    """Compare encoded values; NaN equals NaN, 1 does not equal 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        a, b = a.cpu(), b.cpu()
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b or (a != a and b != b))


# -- places ----------------------------------------------------------------------------------------------------------


def _get(owners: Mapping[str, object], key: Key) -> Any:
    """Return the value at a place, or `_ABSENT`."""
    value: Any = owners.get(key[0], _ABSENT)
    for kind, name in key[1]:
        try:
            value = vars(value)[name] if kind == "." else value[name]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return value


def _parent_has(owners: Mapping[str, object], key: Key) -> bool:
    return _get(owners, key) is not _ABSENT


def _set(owners: Mapping[str, object], key: Key, encoded: Any) -> None:
    """Set the value at a place, in place where others may hold it, or delete it; do nothing where the way there is gone."""
    parent = _get(owners, (key[0], key[1][:-1]))
    if parent is _ABSENT:
        return
    kind, name = key[1][-1]
    old = _get(owners, key)
    if encoded is None:
        if old is not _ABSENT and kind == ".":
            delattr(parent, name)
        elif old is not _ABSENT and isinstance(parent, dict):
            del parent[name]
        return
    new = _decode(encoded, _device(owners))
    if isinstance(new, Tensor) and type(old) is Tensor and not old.requires_grad:
        if (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device):
            old.copy_(new)
            return
    elif type(new) is type(old) and isinstance(new, (dict, set)):
        old.clear()
        old.update(new)
        return
    elif type(new) is type(old) and isinstance(new, (list, deque)):
        old.clear()
        old.extend(new)
        return
    if kind == ".":
        setattr(parent, name, new)
    elif isinstance(parent, dict) or (isinstance(parent, list) and 0 <= name < len(parent)):
        parent[name] = new


def _device(owners: Mapping[str, object]) -> torch.device:
    tensors = (owner for owner in owners.values() if isinstance(owner, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
