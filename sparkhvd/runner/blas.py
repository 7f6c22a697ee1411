"""Threads of numpy's OpenBLAS in a process that will fork: one until then, the variable's number afterwards."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["hold_threads", "restore_threads"]

VARIABLE = "OPENBLAS_NUM_THREADS"
# Builds name their functions differently; numpy's wheels have the first.
_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def hold_threads() -> None:
    """Let OpenBLAS load without threads of its own."""
    os.environ[VARIABLE] = "1"  # noqa: TID251 - OpenBLAS's own


def restore_threads() -> None:
    """Give a loaded OpenBLAS as many threads as the variable says, at most one per processor, as it takes by itself."""
    number = os.environ.get(VARIABLE, "")  # noqa: TID251 - OpenBLAS's own
    if not number.isdecimal() or number == "1":
        return
    maps = Path("/proc/self/maps").read_text(errors="replace")
    for path in {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}:
        library = ctypes.CDLL(path)
        setter = next((name for name in _SETTERS if hasattr(library, name)), None)
        if setter is not None:
            getattr(library, setter)(min(int(number), len(os.sched_getaffinity(0))))
