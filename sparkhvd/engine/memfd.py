"""Memory files by the kernel's own numbers.

Pythons that are built for an old glibc, such as conda's, run on kernels with memory files but have neither
`os.memfd_create` nor the constants of seals; and `fcntl` is imported where it is used, so that a client on
Windows can import this. The numbers are Linux's and never change.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["is_sealed_against_shrinking", "new_memfd", "seal_against_shrinking"]

MFD_CLOEXEC = 1
MFD_ALLOW_SEALING = 2
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SHRINK = 2
# The system call's number by `uname -m`.
SYS_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def new_memfd(name: str) -> int:
    """Create an empty memory file that can be sealed and return its descriptor; close-on-exec.

    Args:
        name: shown in /proc only.

    Raises:
        OSError: memory files are forbidden here, or this kernel has none.
    """
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    number = SYS_MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(f"this Python cannot make memory files on {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(ctypes.c_long(number), name.encode(), ctypes.c_uint(flags)))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"memfd_create: {os.strerror(code)}")
    return descriptor


def seal_against_shrinking(descriptor: int) -> None:
    """Seal a memory file for good, so that it never gets shorter."""
    import fcntl

    fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK)


def is_sealed_against_shrinking(descriptor: int) -> bool:
    """Check whether a received memory file can never get shorter; an OSError if it cannot be sealed."""
    import fcntl

    return bool(fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK)
