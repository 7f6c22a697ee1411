"""Reports of a trainer process on its function, as data: results, exceptions and exits."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import Any

from sparkhvd.errors import CollectiveError, NotInitializedError
from sparkhvd.runner.protocol import dumps


class _UnpicklableResultError(TypeError):
    """Unpicklable result of a function."""


def dump_result(value: object) -> bytes:
    """Pickle the result of the function.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return dumps(value)
    except Exception as e:  # noqa: BLE001 - pickling runs methods of the user's classes
        kind = type(value)
        raise _UnpicklableResultError(
            f"the function returned a {kind.__module__}.{kind.__qualname__}, which cannot be pickled "
            f"({type(e).__name__}: {e}). Return plain data such as numbers, lists or tensors."
        ) from e


def report_of_exit(error: SystemExit) -> dict[str, Any]:
    if error.code is None or error.code == 0:
        return {"kind": "ok", "exit": "ok"}
    code = error.code if isinstance(error.code, int) else 1
    message = "" if isinstance(error.code, int) else str(error.code)
    return {"kind": "exit", "exit": f"exit {code}", "error": "SystemExit", "message": message}


def report_of(error: BaseException, own_file: str) -> dict[str, Any]:
    """Describe a function's exception for the driver.

    Args:
        error: the exception.
        own_file: file that called the function; the traceback starts after its frames.
    """
    if isinstance(
        error, _UnpicklableResultError
    ):  # the frames are not the user's, and the message is enough
        message = str(error)
        return {"kind": "exception", "exit": "exception", "error": "TypeError", "message": message}
    kind = type(error)
    plain = kind.__module__ == "builtins"
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    return {
        "kind": "collective" if _is_consequence(error) else "exception",
        "exit": "exception",
        "error": name,
        "message": _text_of(error),
        "traceback": traceback_of(error, own_file),
    }


def _is_consequence(error: BaseException) -> bool:
    """Whether an exception exists only because another rank was lost."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, CollectiveError) and not isinstance(current, NotInitializedError):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as e:  # noqa: BLE001 - the user's class may raise anything
        return f"(its message cannot be shown: {type(e).__name__})"


def traceback_of(error: BaseException, own_file: str) -> str:
    """Format an exception's traceback, without the frames of the calling file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == own_file:
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception as e:  # noqa: BLE001 - the user's class may raise anything
        return f"{type(error).__name__} (its traceback cannot be shown: {type(e).__name__})"


def peak_rss() -> int:
    """Read this process's peak resident memory in bytes, or 0 if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
