"""How a trainer process allocates memory.

glibc gives blocks above a threshold (32 MiB at most, by default) back to the kernel when they are freed. A training step
frees and allocates every gradient and activation, so every step pays for new, zeroed pages: 13 times as long for
64 MiB as writing them, a quarter of the step of an MLP with 19 million parameters (`docs/results/step.md`).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_NEVER = -1
# Blocks of this size and more are given back also by a trainer: they are rare, and what they would leave is large.
_LARGE_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let freed blocks up to 1 GiB stay with the process, for its next allocations.

    Nothing is changed if the user has configured the allocator (`MALLOC_...`, `GLIBC_TUNABLES`) or it is not glibc's.

    Returns:
        Whether it was changed.
    """
    environ = os.environ  # noqa: TID251 - glibc's own variables
    if any(name.startswith("MALLOC_") for name in environ):
        return False
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if not mallopt(_M_TRIM_THRESHOLD, _NEVER):
        return False
    # Before 2.35 the threshold must not be above 32 MiB; then such blocks never come from the kernel directly.
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES) or mallopt(_M_MMAP_MAX, 0))
