"""Temporary folders of this process, deleted when it ends for any reason.

A process that exits normally deletes its folders. A killed process cannot: SIGKILL and, without a handler, SIGTERM run no
Python. So each folder has a file locked by its process, which the system unlocks when the process is gone. The
next process of the same user on this machine that makes a folder deletes those with a free lock.
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
# Stores do not list names with this prefix.
_OWNER = ".sparkhvd-tmp-owner"
_TRIES = 10


class TemporaryFolders:
    """The folders of this process by key, for example one per Spark application."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._folders: dict[str, str] = {}
        self._kept: dict[str, tuple[str, ...]] = {}

    def folder(self, key: str) -> str:
        """The first call makes the folder, private to this user."""
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
        """Keep a folder of this process, with its entries of these names, when the process ends; no other process deletes it."""
        with self._mutex:
            self._kept[folder] = names
        with contextlib.suppress(OSError):  # some file systems have no lock file
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
            if _lock(folder, os.O_CREAT) is not None:  # stays open until this process ends
                return folder
        except FileNotFoundError:
            continue  # swept between creation and locking
        except OSError:  # a file system without locks: sweeps skip it
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{_OWNER}")
            return folder
    raise OSError(
        f"Temporary folders in {tempfile.gettempdir()} vanish while they are made. Set TMPDIR."
    )


def _sweep() -> None:
    """Delete the folders of this user's ended processes."""
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


# ----------------------------------------------------------------------------------------------------
# Choose the store of a fit or a model without one.

STORE_CONF = "spark.sparkhvd.store"


_temporary = TemporaryFolders()


def default_store(spark: SparkSession, given: object = None) -> Store:
    """Choose the given store (also a path or URL), else the conf's, else a temporary folder on a local master.

    For a Spark Connect session it is the store as this client reaches it, see `connect`.

    Raises:
        InvalidArgumentError: no store is given and the master is not local; or the store cannot be written.
        StoreError: the folder of a given `Store` does not exist; it may no longer be mounted.
    """
    if isinstance(given, Store):
        store = as_seen_by(spark, given)
        if store.is_local and not store.exists(""):
            raise StoreError(
                f"The store {store.url} is not there. If it has vanished, mount it again; a new one is made by "
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
                f"{STORE_CONF} is {without_secrets(conf[STORE_CONF])!r} with a password or key in it, which Spark shows in its "
                "UI and event log. Give it as store=Store.create(...), or let the machines have credentials of their own."
            )
        return _created(spark, conf[STORE_CONF])
    master = conf.get("spark.master", "")
    if not master.startswith("local"):
        raise InvalidArgumentError(
            f"store is not given, and the master is {master!r}: driver and executors need a folder that they "
            f"share. Give store=Store.create('<path or URL>'), or set {STORE_CONF}."
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
    """Keep a store of `is_temporary_store` with its runs when this process ends."""
    _temporary.keep(urlsplit(store.url).path, ("runs", "keras_runs"))


def _created(spark: SparkSession, given: str | PathLike[str]) -> Store:
    if is_connect(spark):
        return as_seen_by(spark, Store(fspath(given)), make=True)
    return Store.create(given)


def _destroy(store: Store) -> None:
    # The session may be over.
    with contextlib.suppress(Exception):
        for path in store.list():
            store.delete(path)
        store.delete_if_empty("")
