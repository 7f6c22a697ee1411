"""Messages between processes of a job: a length, then a payload of so many bytes.

A payload is bytes, a JSON object, or a `Message`: a kind, a JSON object and bytes. JSON of another process is bounded by its frame, and
refused if it is no object, nests too deeply or has numbers outside JSON. Each kind's fields are checked where it is received.

Trust: only for peers that have proved their key, for pipes and for sockets of the same user; a handshake has fixed sizes (`handshake`).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

LENGTH = struct.Struct("!Q")
# Of a message from a process on another host.
MOST_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def frame_of(payload: bytes) -> bytes:
    """Return a payload with its length."""
    return LENGTH.pack(len(payload)) + payload


def take_frame(came: bytearray, most_bytes: int | None = None) -> bytes | None:
    """Remove the first payload from received bytes; None if it is incomplete.

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
    """Write a payload to a pipe; raises BrokenPipeError if the reader is gone."""
    for part in (LENGTH.pack(len(payload)), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def read_frame(fd: int) -> bytes | None:
    """Read a payload from a pipe; None if the writer is gone."""
    header = _read_exactly(fd, LENGTH.size)
    return None if header is None else _read_exactly(fd, LENGTH.unpack(header)[0])


def checked_size(size: int, most_bytes: int | None) -> int:
    """Return the size of a payload; raises ValueError if it is more than `most_bytes`."""
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


def parse(text: bytes) -> dict[str, Any]:
    """Return the JSON object of another process.

    Raises:
        ValueError: it is no object, nests too deeply, or has NaN or infinity, which are outside JSON.
    """
    values = _loads(text)
    if not isinstance(values, dict):
        raise ValueError("a message that is no object")
    return values


def _loads(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as e:
        raise ValueError("a message that nests too deeply") from e


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"a message with {constant}")


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: its kind.
        values: JSON object.
        data: attached bytes.
    """

    kind: str
    values: dict[str, Any] = field(repr=False)  # may hold the key
    data: bytes = field(default=b"", repr=False)


def pack(kind: str, data: bytes, values: Mapping[str, object]) -> bytes:
    """Return the payload of a message."""
    return json.dumps([kind, values]).encode() + b"\n" + data


def unpack(payload: bytes) -> Message:
    """Return the message of a payload.

    Raises:
        ValueError: it is invalid.
    """
    header, _, data = payload.partition(b"\n")
    match _loads(header):
        case [str(kind), dict(values)]:
            return Message(kind, values, data)
        case _:
            raise ValueError("a message without kind and values")
