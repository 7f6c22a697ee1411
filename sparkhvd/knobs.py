"""Declaration of settings, and parsing and checking of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, field
from typing import TypeGuard, TypeVar

from sparkhvd.errors import InvalidArgumentError

__all__ = [
    "Limit",
    "check",
    "check_seconds",
    "is_number",
    "knob",
    "may_be_caught",
    "parse",
    "parse_place",
    "parse_port_range",
    "variables_of",
]

T = TypeVar("T", bool, int, float, str)
Limit = tuple[Callable[[T], bool], str]  # test of a value, and its description for messages


def knob(
    default: T,
    *,
    env: str,
    unit: str,
    doc: str,
    alias: str | None = None,
    limit: Limit[T] | None = None,
) -> T:
    """Declare a setting: a field of a dataclass.

    Args:
        default: its default; its type is the type of the setting.
        env: its environment variable.
        unit: its unit.
        doc: its meaning.
        alias: Horovod's variable for it.
        limit: values that are allowed; None for all of the type.
    """
    metadata = {"env": env, "unit": unit, "doc": doc, "alias": alias, "limit": limit}
    return field(default=default, metadata=metadata)


def variables_of(f: Field[object]) -> list[str]:
    """Return the environment variables of a setting; the first that is set counts."""
    return [name for name in (f.metadata["env"], f.metadata["alias"]) if name]


def _parse_bool(text: str) -> bool:
    return {"0": False, "false": False, "1": True, "true": True}[text.strip().lower()]


_PARSERS: dict[type, Callable[[str], object]] = {
    bool: _parse_bool,
    int: int,
    float: float,
    str: str,
}


def parse(f: Field[object], source: str, text: str) -> object:
    """Return the value of a setting in the text of a variable or key.

    Args:
        f: the setting.
        source: name of the variable or key, for the message.
        text: its text.

    Raises:
        InvalidArgumentError: the text is not of the setting's type, or the value is not allowed.
    """
    kind = type(f.default)
    try:
        value = _PARSERS[kind](text)
    except (KeyError, ValueError):
        raise InvalidArgumentError(
            f"{source}={text!r} is not a valid {kind.__name__}. "
            f"Give a plain {kind.__name__} like {f.default!r}, or unset it."
        ) from None
    check(f, value, source)
    return value


def check(f: Field[object], value: object, source: str) -> None:
    """Refuse a value that the setting does not allow.

    Args:
        f: the setting.
        value: its value.
        source: origin of the value, for the message.

    Raises:
        InvalidArgumentError: the value is not allowed.
    """
    if f.metadata["limit"] is None:
        return
    is_allowed, expected = f.metadata["limit"]
    if not is_allowed(value):
        raise InvalidArgumentError(f"{source} is {value!r}; it must be {expected}.")


def parse_place(text: str) -> tuple[str, int] | None:
    """Return host and port of `host:port` or `[host]:port`; None if it is none."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_good = bool(host) and colon == ":" and port.isdecimal() and 0 < int(port) < 65536
    return (host, int(port)) if is_good else None


def may_be_caught(number: int) -> bool:
    """Return True if a program may handle the signal, or for 0. Numbers of Linux."""
    faults = {4, 6, 7, 8, 11}  # ILL, ABRT, BUS, FPE, SEGV: the process cannot go on
    reserved = {9, 19, 32, 33}  # KILL, STOP, and two of libc's
    return 0 <= number <= 64 and number not in faults | reserved


def parse_port_range(text: str) -> range | None:
    """Return the ports of `first-last`; `range(1)` for no text; None if it is none."""
    if not text:
        return range(1)
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash)):
        return None
    low, high = int(first), int(last or first)
    return range(low, high + 1) if 0 < low <= high < 65536 else None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_seconds(name: str, seconds: object, such_as: float) -> None:
    """Refuse a wait that is not a number of seconds above 0.

    Args:
        name: of the argument or flag.
        seconds: the wait.
        such_as: seconds that the message gives as an example.

    Raises:
        InvalidArgumentError: it is not a number of seconds above 0.
    """
    if not is_number(seconds) or not 0 < seconds < math.inf:
        shown = f"{seconds:g}" if is_number(seconds) else repr(seconds)
        raise InvalidArgumentError(
            f"{name} is {shown}; it must be a number of seconds above 0, such as {such_as:g}."
        )
