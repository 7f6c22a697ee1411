"""Temporary folders, deleted when their process ends for any reason.

A process that exits normally deletes its folders. A killed process cannot, because no Python code runs after SIGKILL or
an unhandled SIGTERM. So each folder has a file that its process locks, and the system unlocks the file when the process
is gone. The next process of the same user on this machine that makes a folder deletes folders whose file is unlocked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from os import PathLike, fspath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sparkhvd.data.store.addresses import secrets_of, without_secrets
from sparkhvd.data.store.connect import as_seen_by, make_private
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.spark import SparkShim, is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_PREFIX = "sparkhvd-store-"
# Name of the locked file in each folder. Its prefix hides it from the listings of stores.
_OWNER = ".sparkhvd-tmp-owner"
_TRIES = 10


class TemporaryFolders:
    """Temporary folders of this process by key, for example one per Spark application."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._folders: dict[str, str] = {}
        self._kept: dict[str, tuple[str, ...]] = {}

    def folder(self, key: str) -> str:
        """Find or make the key's folder, private to this user."""
        with self._mutex:
            if key not in self._folders:
                _sweep()
                folder = _make()
                atexit.register(self._remove, folder, os.getpid())
                self._folders[key] = folder
            return self._folders[key]

    def has(self, folder: str) -> bool:
        with self._mutex:
            return folder in self._folders.values()

    def keep(self, folder: str, names: tuple[str, ...]) -> None:
        """Keep a folder, with its entries of these names, when this process ends. Other processes keep it, too."""
        with self._mutex:
            self._kept[folder] = names
        # The folder has no owner file if its file system has no locks.
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{_OWNER}")

    def _remove(self, folder: str, pid: int) -> None:
        if os.getpid() != pid:  # a forked child inherits the exit function but owns no folders
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
            # The descriptor stays open until this process ends.
            if _lock(folder, os.O_CREAT) is not None:
                return folder
        except FileNotFoundError:
            continue  # another process has deleted the folder before it was locked
        except OSError:
            # The file system has no locks; without the owner file other processes skip the folder.
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{_OWNER}")
            return folder
    raise OSError(
        f"Another process deletes new temporary folders in {tempfile.gettempdir()} at once. Set TMPDIR to another folder."
    )


def _sweep() -> None:
    """Delete the temporary folders of this user's ended processes."""
    if not hasattr(os, "getuid"):
        return
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            # The folder was deleted meanwhile, or its process is alive.
            with contextlib.suppress(OSError):
                if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                    continue
                if (lock := _lock(entry.path)) is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _lock(folder: str, flags: int = 0) -> int | None:
    """Lock a folder's owner file and return its descriptor, or None if another process holds or has deleted it.

    Raises:
        OSError: the file does not exist, or this file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # on Windows, where a Connect client may run
        raise OSError("this system has no file locks") from None
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


# ----------------------------------------------------------------------------------------------------
# Choose the store of a fit or model that was given no store.

STORE_CONF = "spark.sparkhvd.store"


_temporary = TemporaryFolders()


def default_store(spark: SparkSession, given: object = None) -> Store:
    """Choose the given store (or path or URL), else the conf's, else a temporary folder if the master is local.

    For a Spark Connect session, the result is the store as this client reaches it, see `connect`.

    Raises:
        InvalidArgumentError: no store is given and the master is not local, or the store cannot be written.
        StoreError: the folder of a given `Store` does not exist; its file system may not be mounted any more.
    """
    if isinstance(given, Store):
        store = as_seen_by(spark, given)
        if store.is_local and not store.exists(""):
            raise StoreError(
                f"The store {store.url} does not exist. If its file system was unmounted, mount it again; to make a new store, call "
                "setStore(Store.create(...))."
            )
        return store
    if isinstance(given, (str, PathLike)):
        return _created(spark, given)
    if given is not None:
        raise InvalidArgumentError(
            f"store is {given!r:.100}; it must be a Store, for example Store.create('/shared/folder')."
        )
    shim = SparkShim(spark)
    conf = shim.conf((STORE_CONF, "spark.master"))
    if conf.get(STORE_CONF):
        if secrets_of(conf[STORE_CONF], {}):
            raise InvalidArgumentError(
                f"{STORE_CONF} is {without_secrets(conf[STORE_CONF])!r} with a password or key, which Spark would show in its "
                "UI and event log. Give store=Store.create(...) instead, or configure credentials on the machines."
            )
        return _created(spark, conf[STORE_CONF])
    master = conf.get("spark.master", "")
    if not master.startswith("local"):
        raise InvalidArgumentError(
            f"store is not given, and the master is {master!r}: the driver and the executors need a shared folder. "
            f"Give store=Store.create('<path or URL>'), or set {STORE_CONF}."
        )
    folder = _temporary.folder(shim.application())
    if shim.is_connect:
        make_private(spark, folder)
    store = _created(spark, folder)
    if not store.is_seen:
        atexit.register(_destroy, store)
    return store


def is_temporary_store(store: Store) -> bool:
    """Whether `default_store` made the store for this process."""
    return _temporary.has(urlsplit(store.url).path)


def keep_temporary_store(store: Store) -> None:
    """Keep a temporary store and its runs when this process ends."""
    _temporary.keep(urlsplit(store.url).path, ("runs", "keras_runs"))


def _created(spark: SparkSession, given: str | PathLike[str]) -> Store:
    if is_connect(spark):
        return as_seen_by(spark, Store(fspath(given)), make=True)
    return Store.create(given)


def _destroy(store: Store) -> None:
    # The session may have ended.
    with contextlib.suppress(Exception):
        for path in store.list():
            store.delete(path)
        store.delete_if_empty("")
