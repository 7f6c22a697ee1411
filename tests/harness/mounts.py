"""Mounts for tests: small file systems that become full or are lost. Needs root, or an own user namespace."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def mounts(request: pytest.FixtureRequest) -> None:
    """Let the test mount. If this user may not mount, the test runs in a separate process in a namespace where it may."""
    if os.geteuid() == 0:
        return
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"this user may neither mount nor make a user namespace: {probe.stderr!r}")
    command = ["unshare", "-rm", sys.executable, "-m", "pytest", "-q", request.node.nodeid]
    inside = subprocess.run(command, cwd=request.config.rootpath, check=False)
    assert inside.returncode == 0, "the same test in a user namespace"
    pytest.skip("passed in a user namespace")


@contextlib.contextmanager
def tmpfs(at: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory of this size."""
    at.mkdir(parents=True, exist_ok=True)
    mount(b"tmpfs", at, b"tmpfs", f"size={num_bytes}".encode())
    try:
        yield at
    finally:
        unmount(at)


def mount(what: bytes, at: Path, kind: bytes, options: bytes) -> None:
    """Mount a file system without devices or set-user-id programs.

    Raises:
        OSError: this process may not mount.
    """
    nosuid, nodev = 2, 4
    if libc.mount(what, bytes(at), kind, nosuid | nodev, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind.decode()}: {os.strerror(number)}")


def unmount(at: Path) -> None:
    """Unmount `at`, even while processes use it. Does nothing if it is not a mount."""
    libc.umount2(bytes(at), MNT_DETACH)
