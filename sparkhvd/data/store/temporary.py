"""Temporary folders of this process, deleted when it ends, however it ends.

A process that ends well deletes its folders. A killed process cannot: SIGKILL and, without a handler, SIGTERM run no
Python. So each folder has a file that its process keeps locked, which the system unlocks when the process is gone; the
next process of the same user on this machine that makes a folder deletes those whose lock is free.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading

__all__ = ["TemporaryFolders"]

_PREFIX = "sparkhvd-store-"
# A store lists no names with this prefix.
_OWNER = ".sparkhvd-tmp-owner"
_TRIES = 10


class TemporaryFolders:
    """The folders of this process by key, for example one per Spark application."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._folders: dict[str, str] = {}
        self._kept: dict[str, tuple[str, ...]] = {}

    def folder(self, key: str) -> str:
        """Return the folder of a key, private to this user; the first call makes it."""
        with self._mutex:
            if key not in self._folders:
                _sweep()
                folder = _make()
                atexit.register(self._remove, folder, os.getpid())
                self._folders[key] = folder
            return self._folders[key]

    def has(self, folder: str) -> bool:
        """Return True for a folder of this process."""
        with self._mutex:
            return folder in self._folders.values()

    def keep(self, folder: str, names: tuple[str, ...]) -> None:
        """Leave a folder of this process, with what has these names in it, when the process ends; nobody else deletes it then."""
        with self._mutex:
            self._kept[folder] = names
        with contextlib.suppress(OSError):  # it has none on some file systems
            os.unlink(f"{folder}/{_OWNER}")

    def _remove(self, folder: str, pid: int) -> None:
        if os.getpid() != pid:  # a forked child inherits the exit function but owns nothing
            return
        kept = self._kept.get(folder)
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in kept:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _make() -> str:
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            if _lock(folder, os.O_CREAT) is not None:  # open until this process ends
                return folder
        except FileNotFoundError:
            continue  # a sweep came between the file and its lock
        except OSError:  # a file system without locks: nobody sweeps what has no such file
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{_OWNER}")
            return folder
    raise OSError(
        f"Temporary folders in {tempfile.gettempdir()} vanish while they are made. Set TMPDIR."
    )


def _sweep() -> None:
    """Delete the folders of this user's processes that are gone."""
    if not hasattr(os, "getuid"):
        return
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # deleted meanwhile, or alive
                if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                if (lock := _lock(entry.path)) is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _lock(folder: str, flags: int = 0) -> int | None:
    """Lock a folder's owner file; return its descriptor, or None if another process holds or has deleted it.

    Raises:
        OSError: there is no such file, or it cannot be locked here.
    """
    try:
        import fcntl
    except ImportError:  # on Windows, where a Connect client may run
        raise OSError("there are no locks of files") from None
    path = f"{folder}/{_OWNER}"
    lock = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
