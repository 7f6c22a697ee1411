"""Messages between processes of a job: a length, then a payload of so many bytes.

A payload is bytes, a JSON object, or a `Message`: a kind, a JSON object and bytes. `read_json` is the package's only reader of JSON, also of
files: size and depth are bounded, and every problem is a ValueError. `rebuild` makes a dataclass of an object, and compares the types of its
fields.

Trust: only for peers that have proved their key, for pipes and for sockets of the same user; a handshake has fixed sizes (`handshake`).
"""

from __future__ import annotations

import functools
import json
import math
import os
import reprlib
import struct
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar, Union

LENGTH = struct.Struct("!Q")
# Most bytes of a message from another host, and of a JSON text.
MOST_BYTES = 64 << 20
# Most levels of nested lists and objects. Python's own limit depends on its stack, and other functions reach it earlier
# than the parser.
MOST_DEPTH = 200
_READ_BYTES = 1 << 20

T = TypeVar("T")


def frame_of(payload: bytes) -> bytes:
    """Put the length before a payload."""
    return LENGTH.pack(len(payload)) + payload


def take_frame(came: bytearray, most_bytes: int | None = None) -> bytes | None:
    """Remove the first payload from received bytes, or return None if it is incomplete.

    Raises:
        ValueError: it has more than `most_bytes`.
    """
    if len(came) < LENGTH.size:
        return None
    end = LENGTH.size + checked_size(LENGTH.unpack_from(came)[0], most_bytes)
    if len(came) < end:
        return None
    with memoryview(came) as view:
        payload = bytes(view[LENGTH.size : end])
    del came[:end]
    return payload


def write_frame(fd: int, payload: bytes) -> None:
    """Write a payload to a pipe, or raise BrokenPipeError if the reader is gone."""
    for part in (LENGTH.pack(len(payload)), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def read_frame(fd: int) -> bytes | None:
    """Read a payload from a pipe, or return None if the writer is gone."""
    header = _read_exactly(fd, LENGTH.size)
    return None if header is None else _read_exactly(fd, LENGTH.unpack(header)[0])


def checked_size(size: int, most_bytes: int | None) -> int:
    """Raise ValueError if the size of a payload is more than `most_bytes`."""
    if most_bytes is not None and size > most_bytes:
        raise ValueError(f"a message of {size} bytes")
    return size


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = os.read(fd, min(left, _READ_BYTES))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_json(
    text: str | bytes, *, is_strict: bool = False, most_bytes: int | None = MOST_BYTES
) -> Any:
    """Parse JSON within limits of size and depth.

    Args:
        text: of a file or a message.
        is_strict: refuse NaN and infinity, which are outside JSON; Python writes them.
        most_bytes: of the text; None for any number.

    Raises:
        ValueError: it is not JSON, is too large, or nests too deeply.
    """
    checked_size(len(text), most_bytes)
    options: dict[str, Any] = {}
    if is_strict:
        options = {"parse_constant": _refuse, "parse_float": _finite}
    try:
        value = json.loads(text, **options)
    except RecursionError as e:
        raise ValueError("a message that nests too deeply") from e
    # Most texts have too few brackets to nest deeply.
    marks = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, marks)) > MOST_DEPTH:  # type: ignore[arg-type]
        _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        parts: list[Iterable[object]] = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, (dict, list))
        ]
        level = [each for part in parts for each in part]
    if level:
        raise ValueError("a message that nests too deeply")


def parse(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON object of another process.

    Raises:
        ValueError: it is no object, nests too deeply, or has NaN or infinity, which are outside JSON.
    """
    values = read_json(text, is_strict=True)
    if not isinstance(values, dict):
        raise ValueError("a message that is no object")
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"a message with {constant:.20}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


@dataclass(frozen=True)
class Message:
    """Message with a kind, a JSON object and bytes.

    Attributes:
        kind: its kind.
        values: JSON object.
        data: attached bytes.
    """

    kind: str
    values: dict[str, Any] = field(repr=False)  # may hold the job's key
    data: bytes = field(default=b"", repr=False)


def pack(kind: str, data: bytes, values: Mapping[str, object]) -> bytes:
    return json.dumps([kind, values]).encode() + b"\n" + data


def unpack(payload: bytes) -> Message:
    """Parse the payload of a message.

    Raises:
        ValueError: it is invalid.
    """
    header, _, data = payload.partition(b"\n")
    match read_json(header, is_strict=True, most_bytes=None):
        case [str(kind), dict(values)]:
            return Message(kind, values, data)
        case _:
            raise ValueError("a message without kind and values")


# ----------------------------------------------------------------------------------------------------
# Dataclasses from JSON objects, by the annotations of their fields. In JSON, tuples are lists and bytes are hexadecimal
# digits.


def rebuild(kind: type[T], values: object, *, is_strict: bool = True) -> T:
    """Make a dataclass from the fields of a JSON object, or another value by its annotation.

    Args:
        kind: the class, or an annotation.
        values: after JSON.
        is_strict: refuse other fields, which a later version may have added to a file.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    if not is_strict and isinstance(values, dict):
        known = _readers(typing.cast(Any, kind))
        values = {name: value for name, value in values.items() if name in known}
    made: T = _reader(typing.cast(Any, kind))(values)
    return made


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Make a parser of JSON values for a type annotation. It raises ValueError for other values."""
    if kind in (Any, object):
        return lambda value: value
    if kind is bytes:
        text = _reader(str)
        return lambda value: bytes.fromhex(text(value))
    if isinstance(kind, type) and is_dataclass(kind):
        return functools.partial(_fields_of, kind, _readers(kind))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return functools.partial(_any_of, tuple(map(_reader, args)))
    if origin in (dict, Mapping):
        return functools.partial(_dict_of, _reader(args[1]))
    if origin is tuple and args[1:] != (...,):
        return functools.partial(_tuple_of, tuple(map(_reader, args)))
    if origin in (tuple, list, Sequence):
        make = list if origin is list else tuple
        return functools.partial(_list_of, make, _reader(args[0]))
    assert kind in (int, float, str, bool, types.NoneType), kind
    return functools.partial(_plain, kind)


@functools.cache
def _readers(kind: type) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Map each field's name to its reader, and to whether the field is required."""
    hints = typing.get_type_hints(kind)
    return {
        f.name: (_reader(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
    }


def _fields_of(
    kind: type, readers: Mapping[str, tuple[Callable[[Any], Any], bool]], values: object
) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} from {reprlib.repr(values)}")
    made = {}
    for name, (read, is_needed) in readers.items():
        if name in values:
            try:
                made[name] = read(values[name])
            except ValueError as e:
                raise ValueError(f"{kind.__name__}.{name}: {e}") from None
        elif is_needed:
            raise ValueError(f"{kind.__name__} without {name}")
    if len(made) < len(values):
        more = next(name for name in values if name not in readers)
        raise ValueError(f"{kind.__name__} with {reprlib.repr(more)}")
    return kind(**made)


def _any_of(readers: Sequence[Callable[[Any], Any]], value: object) -> Any:
    error: ValueError | None = None
    for read in readers:
        try:
            return read(value)
        except ValueError as e:
            error = error or e
    assert error is not None
    raise error


def _dict_of(read: Callable[[Any], Any], value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is no object")
    return {name: read(each) for name, each in value.items()}


def _list_of(make: Callable[[Any], Any], read: Callable[[Any], Any], value: object) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{reprlib.repr(value)} is no list")
    return make(map(read, value))


def _tuple_of(readers: Sequence[Callable[[Any], Any]], value: object) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != len(readers):
        raise ValueError(f"{reprlib.repr(value)} is no list of {len(readers)}")
    return tuple(read(each) for read, each in zip(readers, value, strict=True))


def _plain(kind: type, value: object) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:  # hundreds of digits
            raise ValueError("a number that is too large") from None
    if type(value) is not kind:
        raise ValueError(f"{reprlib.repr(value)} is no {kind.__name__}")
    return value
