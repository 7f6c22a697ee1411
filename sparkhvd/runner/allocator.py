"""Memory allocator of a trainer process: keeps freed blocks for the next step.

glibc gives blocks above a threshold (32 MiB at most, by default) back to the kernel when they are freed. A training step
frees and allocates every gradient and activation, so every step pays for new, zeroed pages: 13 times as long for
64 MiB as writing them, a quarter of the step of an MLP with 19 million parameters (`docs/results/step.md`).

Before 2.39, glibc's aligned allocation, which is torch's, asks for a little more than it returns, and the rest may end
up in the thread's cache of small blocks. There it keeps the freed block from growing back to what the next allocation
asks for: a loop over one block of 64 MiB took new pages 12 times before it used old ones. So such a process has to
start without that cache; what this costs small allocations is below the noise of a step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_NEVER = -1
# Blocks of this size and more are given back also by a trainer: they are rare, and what they would leave is large.
_LARGE_BYTES = 1 << 30
# Two zeros tell it from a value that the user has set.
_NO_CACHE = "glibc.malloc.tcache_count=00"
_TUNABLES = "GLIBC_TUNABLES"


def start_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a process must start that will call `keep_freed_memory`.

    Args:
        environ: the other variables of the process.
    """
    version = _glibc_version()
    if version is None or version >= (2, 39) or _is_configured(environ):
        return {}
    others = environ.get(_TUNABLES)
    return {_TUNABLES: f"{others}:{_NO_CACHE}" if others else _NO_CACHE}


def keep_freed_memory() -> bool:
    """Let freed blocks up to 1 GiB stay with the process, for its next allocations.

    Nothing is changed if the user has configured the allocator (`MALLOC_...`, `GLIBC_TUNABLES`) or it is not glibc's.

    Returns:
        True if the allocator was changed.
    """
    environ = os.environ  # noqa: TID251 - glibc's own variables
    # It has been read; the user's own processes must not inherit it.
    tunables = environ.pop(_TUNABLES, "").split(":")
    others = [tunable for tunable in tunables if tunable not in ("", _NO_CACHE)]
    if others:
        environ[_TUNABLES] = ":".join(others)
    if _glibc_version() is None or _is_configured(environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_M_TRIM_THRESHOLD, _NEVER):
        return False
    # Before 2.35 the threshold must not be above 32 MiB; then such blocks never come from the kernel directly.
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) or mallopt(_M_MMAP_MAX, 0))


def _is_configured(environ: Mapping[str, str]) -> bool:
    return any(name.startswith("MALLOC_") for name in environ) or (
        "glibc.malloc" in environ.get(_TUNABLES, "")
    )


def _glibc_version() -> tuple[int, int] | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, OSError, ValueError):
        return None  # another C library
    name, _, version = text.partition(" ")
    major, minor = [*version.split("."), ""][:2]
    if name != "glibc" or not (major.isdecimal() and minor.isdecimal()):
        return None
    return int(major), int(minor)
