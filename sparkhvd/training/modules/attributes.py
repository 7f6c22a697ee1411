"""Attribute changes of modules, parameters and losses during a run, outside torch's state dicts.

Examples: `model.dropout.p = 0.3`, `model.config["tau"] *= 0.9`, a counter in `forward`, `parameter.lr_scale = 0.1`. A
checkpoint holds the values that differ from the program's. A value's place is the name of its owner and the path from
the owner to the value. If two places refer to the same object, they refer to the same object again after loading.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# Steps from an owner to a value: (".", attribute) or ("[]", key of a dict or index of a list).
Path = tuple[tuple[str, Any], ...]
Key = tuple[str, Path]
# Owner, path, the encoded value (None for a deleted value), and whether the value has changed since `begun`.
Entry = list[Any]

_OF_TORCH = frozenset(vars(nn.Module()))
_DEPTH = 5
# Larger arrays and tensors are inspected only if a callback set them, because `forward` may store its outputs.
_LARGE_BYTES = 1 << 20
_ABSENT = object()
_FOREIGN = {"torch", "numpy", "pandas", "pyarrow", "pyspark", "py4j", "sparkhvd"}
_SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": lambda pairs: defaultdict(None, pairs),
}
_NAMES: dict[type, str] = {
    **{kind: kind.__name__ for kind in (list, tuple, set, frozenset, deque)},
    **{kind: kind.__name__ for kind in (dict, OrderedDict, Counter, defaultdict)},
}
GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)
# Types of values that a record may hold, that are not saved, and that do not change in place.
_FIXED = (
    *(type, FunctionType, BuiltinFunctionType, PurePath, datetime.date, datetime.timedelta),
    *(decimal.Decimal, nn.Module, Tensor),
)
# Types of objects that several places may share.
_SHARED = (dict, list, set, deque, Tensor, np.ndarray, *GENERATORS)


class _Same(NamedTuple):
    """Marker for a place with the same object as another place."""

    key: Key


class Attributes:
    """Changes of the attributes of objects."""

    def __init__(self, owners: Callable[[], Mapping[str, object]]) -> None:
        """Record the current values as the program's.

        Args:
            owners: returns the objects by name; called before each inspection.
        """
        self._owners = owners
        self._classes = {name: type(owner) for name, owner in owners().items()}
        self._first = self._inspect()
        self._begun = self._first

    def begun(self) -> None:
        """Record the values after `on_train_begin`. Every start of a run sets them again."""
        self._begun = self._inspect()

    def replaced(self) -> list[str]:
        """List the names of removed objects and of objects with another class."""
        classes = {name: type(owner) for name, owner in self._owners().items()}
        return [name for name, kind in self._classes.items() if classes.get(name) is not kind]

    def reset(self) -> None:
        """Reset everything to the program's values."""
        _load(self._owners(), self._first, [])

    def changes(self, large: Collection[tuple[str, str]] = ()) -> list[Entry]:
        """List the attributes that differ from the program's values.

        Args:
            large: (owner, attribute) of large values to include.
        """
        owners = self._owners()
        found = _walk(owners, large)
        entries: list[Entry] = []
        for key, value in found.items():
            if _is(self._first.get(key, _ABSENT), value):
                continue
            is_later = not _is(self._begun.get(key, _ABSENT), value)
            entries.append([*_plain_key(key), _encode(value), is_later])
        for key in (self._first.keys() | self._begun.keys()) - found.keys():
            is_later = key in self._begun
            if _get(owners, key) is not _ABSENT:
                if _is_shared(self._first.get(key)) or _is_shared(self._begun.get(key)):
                    entries.append([*_plain_key(key), ("apart", None), is_later])
                continue  # the value has an unsupported kind
            if is_later or key in self._first:
                entries.append([*_plain_key(key), None, is_later])
        return entries

    def load(self, entries: Iterable[Entry], *, own: bool) -> None:
        """Set changed values, and reset unchanged ones.

        Args:
            entries: result of `changes`.
            own: whether the entries are from this rank; otherwise the values set by `on_train_begin` stay.
        """
        if own:
            _load(self._owners(), self._first, list(entries))
        else:
            _load(self._owners(), self._begun, [entry for entry in entries if entry[3]])

    def _inspect(self) -> dict[Key, Any]:
        """Encode values, by place, or return None for a large value."""
        return {
            key: None if _num_bytes(value) > _LARGE_BYTES else _encode(value)
            for key, value in _walk(self._owners(), None).items()
        }


def set_attributes(owners: Mapping[str, object], entries: Iterable[Entry]) -> None:
    """Set values from `Attributes.changes`. Missing places are skipped."""
    before = {key: _encode(value) for key, value in _walk(owners, ()).items()}
    _load(owners, before, list(entries))


def views(owners: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (attribute, parameter) pairs where the attribute shares memory with a trained parameter.

    A copy of the module would not share this memory.
    """
    named: dict[int, str] = {}
    for name, owner in owners.items():
        if isinstance(owner, nn.Module):
            own = {n: p for n, p in owner._parameters.items() if p is not None and p.requires_grad}
            named |= {
                p.untyped_storage().data_ptr(): f"{name}.{n}".strip(".")
                for n, p in own.items()
                if _has_memory(p)
            }
    for (name, path), value in _walk(owners, None).items():
        if isinstance(value, Tensor) and _has_memory(value):
            whole = named.get(value.untyped_storage().data_ptr())
            # Skip the attribute of spectral_norm. At first it is the parameter's data, but a hook replaces it in every
            # forward.
            if whole is not None and whole != f"{name}.{path[0][1]}_orig".strip("."):
                yield f"{name}.{path[0][1]}".strip("."), whole


def _has_memory(tensor: Tensor) -> bool:
    if nn.parameter.is_lazy(tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _plain_key(key: Key) -> list[Any]:
    return [key[0], [list(step) for step in key[1]]]


def _key(plain: Any) -> Key:
    return plain[0], tuple((str(kind), _hashable(name)) for kind, name in plain[1])


def _hashable(name: Any) -> Any:
    return tuple(name) if isinstance(name, list) else name


# -- looking ---------------------------------------------------------------------------------------------------------


def _walk(
    owners: Mapping[str, object], large: Collection[tuple[str, str]] | None
) -> dict[Key, object]:
    """Collect the supported values by place. A shared object is at its first place, and `_Same` at its other places.

    Args:
        owners: objects by name.
        large: attributes whose large values are included; None: all.
    """
    found: dict[Key, object] = {}
    seen: dict[int, Key | None] = {id(owner): None for owner in owners.values()}

    def add(key: Key, value: object, depth: int) -> None:
        if id(value) in seen:
            if (first := seen[id(value)]) is not None:
                found[key] = _Same(first)
        elif can_be_kept(value):
            if isinstance(value, _SHARED):
                seen[id(value)] = key
            is_wanted = large is None or (key[1] and (key[0], key[1][0][1]) in large)
            if is_wanted or _num_bytes(value) <= _LARGE_BYTES:
                found[key] = value
        elif depth and (parts := _parts(value)):
            seen[id(value)] = key
            for step, part in parts:
                add((key[0], (*key[1], step)), part, depth - 1)

    for key, value in _roots(owners):
        if not key[1]:
            del seen[id(value)]
        add(key, value, _DEPTH)
    return found


def _roots(owners: Mapping[str, object]) -> Iterator[tuple[Key, object]]:
    """Yield the attributes of objects, and dicts, lists and sets themselves."""
    for name, owner in owners.items():
        if isinstance(owner, (dict, list, set, deque)):
            yield (name, ()), owner
            continue
        for attribute, value in _attributes(owner).items():
            if not _is_of_torch(owner, attribute):
                yield (name, ((".", attribute),)), value


def _attributes(owner: object) -> dict[str, object]:
    """Collect the attributes of an object, including slots."""
    found: dict[str, object] = dict(getattr(owner, "__dict__", {}))
    if not isinstance(owner, (nn.Module, Tensor)):
        for kind in type(owner).__mro__:
            for name, slot in vars(kind).items():
                if isinstance(slot, MemberDescriptorType) and hasattr(owner, name):
                    found[name] = getattr(owner, name)
    return found


def _is_of_torch(owner: object, attribute: str) -> bool:
    """Whether an attribute belongs to a state dict, torch, transformers or this package."""
    if isinstance(owner, torch.optim.Optimizer):
        return attribute.startswith("_") or attribute in ("state", "param_groups")
    is_modules = isinstance(owner, nn.Module) and attribute in _OF_TORCH
    # A mark that transformers sets when it installs forward hooks; the driver's module gets it at its own first call.
    is_mark = attribute == "_output_capturing_hooks_installed"
    return is_modules or is_mark or attribute.startswith(("_dynamo", "__"))


def _parts(value: object) -> list[tuple[tuple[str, Any], object]]:
    """Split a value into its parts, each with the step to it.

    It is for values that cannot be saved as a whole.
    """
    if isinstance(value, dict):
        return [(("[]", k), each) for k, each in value.items() if _is_key(k)]
    if isinstance(value, (list, tuple)):
        parts = [(("[]", i), each) for i, each in enumerate(value)]
        # Entries of tuples cannot be set, but their attributes can.
        return [p for p in parts if isinstance(value, list) or not can_be_kept(p[1])]
    if is_record(value):
        return [((".", name), each) for name, each in vars(value).items()]
    return []


def _is_key(key: object) -> bool:
    is_tuple = type(key) is tuple and all(type(each) in (str, int) for each in key)
    return type(key) in (str, int) or is_tuple


def is_record(value: object) -> bool:
    """Check whether a value is an object of plain values, such as a configuration."""
    return _is_record(value, set(), _DEPTH)


def _is_record(value: object, seen: set[int], depth: int) -> bool:
    if (
        not hasattr(value, "__dict__")
        or callable(value)
        or isinstance(value, (Enum, *_FIXED, ModuleType))
        or type(value).__module__.partition(".")[0] in _FOREIGN
    ):
        return False
    seen.add(id(value))
    return all(_is_value(each, seen, depth - 1) for each in vars(value).values())


def _is_value(value: object, seen: set[int], depth: int) -> bool:
    """Check whether a record may hold a value. An object with a lock or a connection is not a record."""
    if id(value) in seen or can_be_kept(value) or isinstance(value, _FIXED):
        return True
    if not depth:
        return False
    if isinstance(value, (dict, list, tuple)):
        seen.add(id(value))
        parts = value.values() if isinstance(value, dict) else value
        return all(_is_value(each, seen, depth - 1) for each in parts)
    return _is_record(value, seen, depth)


def is_plain(value: object, depth: int = 32) -> bool:
    """Check whether a value is a number, text, None, or a dict, list or tuple of these."""
    if type(value) in (dict, list, tuple):
        if not depth:  # it may contain itself
            return False
        parts: Iterable[object] = value  # type: ignore[assignment]
        if isinstance(value, dict):
            parts = (*value.keys(), *value.values())
        return all(is_plain(each, depth - 1) for each in parts)
    return value is None or type(value) in (bool, int, float, complex, str)


def can_be_kept(value: object, depth: int = 32) -> bool:
    """Check whether a checkpoint can hold an attribute's value as a whole."""
    if is_plain(value):
        return True
    if isinstance(value, Tensor):
        # Exclude tensors of a graph, such as outputs that a layer stores.
        is_alone = type(value) is Tensor and not value.requires_grad
        return is_alone and value.layout == torch.strided and value.device.type != "meta"
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufcSUmM"
    if not depth:
        return False
    kind = _NAMES.get(type(value))
    if kind in _MAPPINGS:
        items = value.items()  # type: ignore[attr-defined]
        return all(is_plain(k) and can_be_kept(each, depth - 1) for k, each in items)
    if kind in _SEQUENCES:
        entries: Iterable[object] = value  # type: ignore[assignment]
        return all(can_be_kept(each, depth - 1) for each in entries)
    return isinstance(value, (bytes, Enum, torch.dtype, torch.device, torch.Size, *GENERATORS))


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
    """Encode a copy of a value as (kind, content), readable by torch.load with weights_only."""
    if isinstance(value, _Same):
        return "same", _plain_key(value.key)
    if isinstance(value, Tensor):
        return "tensor", value.detach().clone(), value.device.type == "cpu"
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return kind, value.dtype.str, list(value.shape), _encode(value.tobytes())
    if isinstance(value, bytes):  # torch.load rejects empty bytes
        return "bytes", torch.from_numpy(np.frombuffer(value, np.uint8).copy())
    if isinstance(value, Enum):
        return "Enum", value.name
    if isinstance(value, (torch.dtype, torch.device)):
        return type(value).__name__, str(value).removeprefix("torch.")
    if isinstance(value, torch.Size):
        return "Size", list(value)
    if isinstance(value, GENERATORS):
        return "generator", _encode(_state_of(value))
    if is_plain(value):
        return "value", copy.deepcopy(value)
    kind = _NAMES[type(value)]
    if kind in _MAPPINGS:
        return kind, [[_encode(k), _encode(each)] for k, each in value.items()]
    of_deque = [value.maxlen] if isinstance(value, deque) else []
    entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    return kind, list(map(_encode, entries)), *of_deque


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state()
        if isinstance(generator, np.random.RandomState)
        else generator.getstate()
    )


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)


def _decode(encoded: Any, device: torch.device, old: Any = None) -> Any:
    """Decode a value. Update and return `old` if possible, because other objects may refer to it.

    Args:
        encoded: result of `_encode`.
        device: device for tensors that were on an accelerator.
        old: the object at the place; for an Enum or a generator it must have the same class.
    """
    kind, content, *more = encoded
    if kind == "tensor":
        new = content.clone() if more[0] else content.to(device, copy=True)
        return _in_place(old, new)
    if kind in ("array", "number"):
        shape, data = more
        array = np.frombuffer(_decode(data, device), np.dtype(content)).reshape(shape).copy()
        return _in_place(old, array) if kind == "array" else array[()]
    if kind == "bytes":
        return content.numpy().tobytes()
    if kind == "Enum":
        return type(old)[content] if isinstance(old, Enum) else old
    if kind == "generator":
        _set_state(old, _decode(content, device))
        return old
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "Size":
        return torch.Size(content)
    if kind in _MAPPINGS:
        olds = old if isinstance(old, dict) else {}
        keys = [_decode(k, device) for k, _ in content]
        pairs = [
            (k, _decode(v, device, olds.get(k))) for k, (_, v) in zip(keys, content, strict=True)
        ]
        return _in_place(old, _MAPPINGS[kind](pairs))
    if kind in _SEQUENCES:
        entries = old if isinstance(old, (list, deque, tuple)) else []
        padded = [*entries, *[None] * len(content)]
        parts = [_decode(each, device, was) for each, was in zip(content, padded, strict=False)]
        return _in_place(old, _SEQUENCES[kind](parts, *more))
    return _in_place(old, copy.deepcopy(content))


def _in_place(old: Any, new: Any) -> Any:
    """Update an object in place and return it, or return the new value if this is impossible."""
    if type(new) is not type(old) or old is new:
        return new
    if isinstance(new, Tensor):
        is_alike = (old.dtype, old.shape, old.device) == (new.dtype, new.shape, new.device)
        return old.copy_(new) if is_alike and not old.requires_grad else new
    if isinstance(new, np.ndarray):
        if (old.dtype, old.shape) != (new.dtype, new.shape) or not old.flags.writeable:
            return new
        old[...] = new
        return old
    if isinstance(new, dict):
        merged = {k: _in_place(old.get(k), v) for k, v in new.items()}
        old.clear()
        old.update(merged)
        return old
    if isinstance(new, (list, deque)):
        padded = [*old, *[None] * len(new)]
        merged_entries = [_in_place(was, v) for was, v in zip(padded, new, strict=False)]
        old.clear()
        old.extend(merged_entries)
        return old
    if isinstance(new, set):
        old.clear()
        old.update(new)
        return old
    return new


def _is(encoded: Any, value: object) -> bool:
    """Check whether a value equals the encoded value. A large value, encoded as None, is not compared."""
    if value is _ABSENT or encoded is _ABSENT:
        return value is encoded
    if encoded is None:
        return _num_bytes(value) > _LARGE_BYTES
    if not isinstance(value, _Same) and not can_be_kept(value):
        return False
    return is_same(encoded, _encode(value))


def is_same(a: Any, b: Any) -> bool:
    """Compare values of states strictly: NaN equals NaN, 1 does not equal 1.0, and the order of a dict counts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        a, b = a.detach().cpu(), b.detach().cpu()
        return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return is_same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    try:
        return bool(a == b or (a != a and b != b))
    except Exception:  # noqa: BLE001 - a user class may compare in another way
        return False


# -- places ----------------------------------------------------------------------------------------------------------


def _load(owners: Mapping[str, object], before: Mapping[Key, Any], entries: list[Entry]) -> None:
    """Set all places to `before` updated by the entries, and delete all other places.

    Shared objects stay shared.
    """
    there = _walk(owners, None)
    wanted = {key: encoded for key, encoded in before.items() if encoded is not None}
    wanted |= {_key(entry): entry[2] for entry in entries}
    same = {key for key, encoded in wanted.items() if _is_shared(encoded)}
    # Places below a shared object belong to its first place.
    wanted = {key: encoded for key, encoded in wanted.items() if not same & _above(key)}
    for key, value in there.items():
        is_large = not isinstance(value, _Same) and _num_bytes(value) > _LARGE_BYTES
        if key not in before and key not in wanted and not is_large:
            _set(owners, key, _ABSENT)
    for key, encoded in wanted.items():
        if encoded == ("apart", None) and isinstance(there.get(key), _Same):
            # A separate object, whose values are set below.
            _set(owners, key, copy.deepcopy(_get(owners, key)))
    marks = {key: _encode(value) for key, value in there.items() if isinstance(value, _Same)}
    sharing, shared = _sharing(wanted), _sharing(marks)
    for key, encoded in wanted.items():
        if encoded is None:
            _set(owners, key, _ABSENT)
        elif encoded[0] not in ("same", "apart"):
            alike = sharing.get(key) == shared.get(key)  # otherwise wrong places share the object
            if not (alike and _is(encoded, there.get(key, _ABSENT))):
                _set(owners, key, _decoded(encoded, owners, key, in_place=alike))
    for key in wanted.keys() & same:
        value = _get(owners, _key(wanted[key][1]))
        if value is not _ABSENT and _get(owners, key) is not value:
            _set(owners, key, value)


def _decoded(encoded: Any, owners: Mapping[str, object], key: Key, *, in_place: bool) -> Any:
    old = _get(owners, key)
    keeps_class = isinstance(old, (Enum, *GENERATORS))
    return _decode(
        encoded, _device(owners), old if old is not _ABSENT and (in_place or keeps_class) else None
    )


def _above(key: Key) -> set[Key]:
    return {(key[0], key[1][:n]) for n in range(len(key[1]))}


def _is_shared(encoded: Any) -> bool:
    return encoded is not None and encoded[0] == "same"


def _sharing(places: Mapping[Key, Any]) -> dict[Key, set[Key]]:
    """Map the first place of an object to its other places."""
    found: dict[Key, set[Key]] = {}
    for key, encoded in places.items():
        if _is_shared(encoded):
            found.setdefault(_key(encoded[1]), set()).add(key)
    return found


def _get(owners: Mapping[str, object], key: Key) -> Any:
    """Find the value at a place, or `_ABSENT`."""
    value: Any = owners.get(key[0], _ABSENT)
    for kind, name in key[1]:
        try:
            value = _attributes(value)[name] if kind == "." else value[name]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return value


def _set(owners: Mapping[str, object], key: Key, value: Any) -> None:
    """Set or delete the value at a place, if its path still exists."""
    if not key[1]:  # the owner itself was updated in place
        return
    parent = _get(owners, (key[0], key[1][:-1]))
    if parent is _ABSENT:
        return
    kind, name = key[1][-1]
    if value is _ABSENT:
        if kind == "." and hasattr(parent, name):
            delattr(parent, name)
        elif isinstance(parent, dict):
            parent.pop(name, None)
    elif kind == ".":
        setattr(parent, name, value)
    elif isinstance(parent, dict) or (isinstance(parent, list) and 0 <= name < len(parent)):
        parent[name] = value


def _device(owners: Mapping[str, object]) -> torch.device:
    tensors = (owner for owner in owners.values() if isinstance(owner, Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def unreadable_type(value: object) -> str:
    """Find a state's first type rejected by `torch.load` with weights_only, or return ""."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return next((kind for v in value if (kind := unreadable_type(v))), "")
    if isinstance(value, bytes) and not value:
        return "bytes object of length 0"
    plain = (type(None), bool, int, float, complex, str, bytes, Tensor, np.number, np.bool_)
    return "" if isinstance(value, plain) else type(value).__name__
