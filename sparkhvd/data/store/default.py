"""Choose the store of a fit or a model that names none."""

from __future__ import annotations

import atexit
import contextlib
from os import PathLike, fspath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sparkhvd.data.store.addresses import secrets_of, without_secrets
from sparkhvd.data.store.connect import as_seen_by, make_private
from sparkhvd.data.store.store import Store
from sparkhvd.data.store.temporary import TemporaryFolders
from sparkhvd.errors import InvalidArgumentError, StoreError
from sparkhvd.sessions import is_connect
from sparkhvd.spark import SparkShim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["STORE_CONF", "default_store", "is_temporary_store", "keep_temporary_store"]

STORE_CONF = "spark.sparkhvd.store"


_temporary = TemporaryFolders()


def default_store(spark: SparkSession, given: object = None) -> Store:
    """Return the given store (also as a path or URL), else the conf's, else a temporary folder on a local master.

    For a Spark Connect session that is the store as this client reaches it, see `connect`.

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
    """Return True for a store that `default_store` has made for this process."""
    return _temporary.has(urlsplit(store.url).path)


def keep_temporary_store(store: Store) -> None:
    """Leave a store of `is_temporary_store` with its runs when this process ends."""
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
