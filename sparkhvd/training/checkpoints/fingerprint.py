"""Differences, in words, between two fits of which one would resume from the other."""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = ["differences"]

# A model of thousands of parameters must not fill the screen.
_MOST_SHOWN = 8
_MOST_CHARACTERS = 80
_ABSENT = object()


def differences(old: str, new: str) -> str:
    """Describe the differences between two fingerprints (JSON objects) of fits; "" if there are none.

    "batch_size was 8 and is 16; model: '0.weight' was [6, 2] float32 and is [8, 2] float32".
    """
    befores, nows = json.loads(old), json.loads(new)
    texts = []
    for name in {**nows, **befores}:
        before, now = befores.get(name), nows.get(name)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            texts.append(f"{name}: {_entries(before, now)}")
        else:
            texts.append(_entry(name, before, now))
    return "; ".join(texts)


def _entries(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    names = [n for n in {**now, **before} if before.get(n, _ABSENT) != now.get(n, _ABSENT)]
    texts = [
        _entry(repr(n), before.get(n, _ABSENT), now.get(n, _ABSENT)) for n in names[:_MOST_SHOWN]
    ]
    if len(names) > _MOST_SHOWN:
        texts.append(f"and {len(names) - _MOST_SHOWN} more")
    return ", ".join(texts)


def _entry(name: str, before: object, now: object) -> str:
    if before is _ABSENT:
        return f"{name} is new"
    if now is _ABSENT:
        return f"{name} is gone"
    texts = json.dumps(before), json.dumps(now)
    if sum(map(len, texts)) < _MOST_CHARACTERS:
        return f"{name} was {texts[0]} and is {texts[1]}"
    return f"{name} differs"
