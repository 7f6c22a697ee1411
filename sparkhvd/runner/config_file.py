"""`--config-file` of `sparkhvdrun`: flags from a YAML file in the form of horovodrun's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from sparkhvd.errors import InvalidArgumentError

__all__ = ["flags_of"]

# Sections; the prefix of their flags, and keys that are called otherwise there.
_SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "params": ("", {}),
    "autotune": ("autotune_", {"enabled": "autotune"}),
    "timeline": ("timeline_", {}),
    "stall_check": ("stall_check_", {"enabled": "stall_check"}),
    "library_options": ("", {}),
    "logging": ("log_", {"hide_timestamp": "log_with_timestamp"}),
}


def flags_of(path: str, known: Collection[str]) -> dict[str, Any]:
    """Return the values of flags, by the name under which the parser keeps them.

    Args:
        path: of the file.
        known: those names; of a flag without effect it is the flag.

    Raises:
        InvalidArgumentError: PyYAML is missing, the file cannot be read or is of another form, a key is unknown, or a number is
            negative.
    """
    found: dict[str, Any] = {}
    for where, name, value in _entries(path, _load(path)):
        flag = "--" + name.replace("_", "-")
        target = next((each for each in (name, flag) if each in known), None)
        if target is None:
            raise InvalidArgumentError(f"--config-file {path!r} has {where}, which is no option.")
        if isinstance(value, bool):
            # A switch of a flag without effect is only told of.
            found[target] = value if target == flag else str(int(value))
        elif value is not None:
            if not isinstance(value, (int, float, str)):
                raise InvalidArgumentError(
                    f"--config-file {path!r}: {where} is {value!r}; it must be one number, text, true or false."
                )
            if isinstance(value, (int, float)) and not 0 <= value < math.inf:
                raise InvalidArgumentError(
                    f"--config-file {path!r}: {where} is {value}; it must be a number of 0 or more."
                )
            found[target] = str(value)
    return found


def _load(path: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidArgumentError(
            "--config-file needs PyYAML, which is not installed here: pip install pyyaml, or give the flags themselves."
        ) from error
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"--config-file {path!r} cannot be read: {error}.") from error


def _entries(path: str, content: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield place, flag's name and value of each entry."""
    if not isinstance(content, dict) or not content:
        raise InvalidArgumentError(
            f"--config-file {path!r} {'is empty' if not content else 'has none'}; it must have sections, such as params and timeline."
        )
    for section, entries in content.items():
        if section == "controller":
            if not isinstance(entries, str):
                raise InvalidArgumentError(
                    f"--config-file {path!r}: controller is {entries!r}; it must be a name such as gloo or mpi."
                )
            yield section, entries, True
            continue
        if section not in _SECTIONS or not isinstance(entries, dict):
            raise InvalidArgumentError(
                f"--config-file {path!r} has the section {section!r}; sections are controller, {', '.join(_SECTIONS)}, with "
                "options in them."
            )
        prefix, renamed = _SECTIONS[section]
        for key, value in entries.items():
            yield f"{section}.{key}", renamed.get(key, f"{prefix}{key}"), value
