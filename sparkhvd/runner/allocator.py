"""Memory allocator of a trainer process: keeps freed blocks for the next step.

By default glibc returns freed blocks above a threshold (32 MiB at most) to the kernel. A training step
frees and allocates every gradient and activation, so every step pays for new, zeroed pages: 13 times as long for
64 MiB as writing them, a quarter of the step of an MLP with 19 million parameters (`docs/results/step.md`).

Before 2.39, glibc's aligned allocation, which torch uses, requests slightly more than it returns, and the rest may end
up in the thread's cache of small blocks. There it keeps the freed block from coalescing to the size of the next
request: a loop over one block of 64 MiB used new pages 12 times before it reused old ones. So such a process must start
without that cache. The cost for small allocations is below the noise of a step.
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
# Larger blocks are returned also by a trainer: they are rare, and keeping them would cost much memory.
_LARGE_BYTES = 1 << 30
# The two zeros distinguish this value from a value of the user.
_NO_CACHE = "glibc.malloc.tcache_count=00"
_TUNABLES = "GLIBC_TUNABLES"


def start_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Choose the environment variables to start a process with, for `keep_freed_memory`.

    Empty if glibc does not need them, or the user has configured its allocator.

    Args:
        environ: the other variables of the process.
    """
    version = _glibc_version()
    if version is None or version >= (2, 39) or _is_configured(environ):
        return {}
    others = environ.get(_TUNABLES)
    return {_TUNABLES: f"{others}:{_NO_CACHE}" if others else _NO_CACHE}


def keep_freed_memory() -> bool:
    """Keep freed blocks up to 1 GiB in the process, for its next allocations.

    Changes nothing if the user has configured the allocator (`MALLOC_...`, `GLIBC_TUNABLES`), or it is not glibc's.

    Returns:
        True if the allocator was changed.
    """
    environ = os.environ  # noqa: TID251 - glibc's own variables
    # glibc has read the variable. The user's own processes must not inherit sparkhvd's part of it.
    tunables = environ.pop(_TUNABLES, "").split(":")
    others = [tunable for tunable in tunables if tunable not in ("", _NO_CACHE)]
    if others:
        environ[_TUNABLES] = ":".join(others)
    if _glibc_version() is None or _is_configured(environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_M_TRIM_THRESHOLD, _NEVER):
        return False
    # glibc before 2.35 allows a threshold of at most 32 MiB. There, switch mmap off instead.
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
