"""What two fits must share so that one can go on where the other stopped, and what differs, in words."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["differences"]

# A model of thousands of parameters must not fill the screen.
_MOST_SHOWN = 8
_MOST_CHARACTERS = 80
_ABSENT = object()


def differences(theirs: str, ours: str) -> str:
    """What differs between two fingerprints (JSON objects) of fits, in words; "" if nothing does.

    "batch_size was 8 and is 16; model: '0.weight' was [6, 2] float32 and is [8, 2] float32".
    """
    found, wanted = json.loads(theirs), json.loads(ours)
    texts = []
    for name in {**wanted, **found}:
        before, now = found.get(name), wanted.get(name)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            texts.append(f"{name}: {_entries(before, now)}")
        else:
            texts.append(_one(name, before, now))
    return "; ".join(texts)


def _entries(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = [n for n in {**now, **before} if before.get(n, _ABSENT) != now.get(n, _ABSENT)]
    texts = [
        _one(repr(n), before.get(n, _ABSENT), now.get(n, _ABSENT)) for n in names[:_MOST_SHOWN]
    ]
    if len(names) > _MOST_SHOWN:
        texts.append(f"and {len(names) - _MOST_SHOWN} more")
    return ", ".join(texts)


def _one(name: str, before: Any, now: Any) -> str:
    if before is _ABSENT:
        return f"{name} is new"
    if now is _ABSENT:
        return f"{name} is gone"
    texts = json.dumps(before), json.dumps(now)
    if sum(map(len, texts)) < _MOST_CHARACTERS:
        return f"{name} was {texts[0]} and is {texts[1]}"
    return f"{name} differs"
