"""Small files of a store with a checksum, which tells a damaged file from another version of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["dump_sealed", "load_sealed"]

_SEAL = "sha256"


def dump_sealed(values: Mapping[str, object]) -> bytes:
    """Return a JSON object as bytes, with the SHA-256 of its other entries as the entry "sha256"."""
    # Through JSON once, so that the checksum is of what a reader gets (tuples are lists then).
    plain = json.loads(json.dumps(dict(values)))
    return json.dumps({**plain, _SEAL: _digest(plain)}, indent=1).encode()


def load_sealed(data: bytes, *, required: bool = True) -> dict[str, Any] | None:
    """Return the entries that `dump_sealed` wrote; None if the file is damaged.

    Args:
        data: the file.
        required: treat a file without a checksum, as older versions wrote it, as damaged.
    """
    try:
        values = json.loads(data)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    seal = values.pop(_SEAL, None)
    if seal is None:
        return None if required else values
    return values if seal == _digest(values) else None


def _digest(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
